"""One classifier, many customers, each with classes that must not be recognised: served.

    pip install "wfilter[serve]"
    python examples/mixed_tenants.py

Untrains a small network on digits, writes a policy with three customers, starts ``wfilter serve``
on this machine and asks as each of them. Requests of all customers share batches; what a customer
must not recognise is decided by its token. Prints what each gets. About a minute on two cores.
"""

import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

import wfilter
from wfilter.cli.demo import example_problem
from wfilter.serve import Client, new_token

FORBIDDEN = {"museum": [1, 7], "bank": [0, 8, 9], "school": []}
PORT, REQUESTS = 8217, 150

model, train, test = example_problem(__doc__, [])
folder = Path(tempfile.mkdtemp())
save_file(dict(model.state_dict()), folder / "base.safetensors")
(folder / "settings.toml").write_text(
    'model = "wfilter:cnn-digits"\nweights = "base.safetensors"\ndataset = "digits"\n'
)
images, labels = train.batch(torch.arange(len(train)))
names = [str(label) for label in range(10)]
wf = wfilter.apply_weight_filtering(model, class_names=names, example_input=images[:1])
recipe = replace(wfilter.RECIPES["distill-soft"], set_share=0.5, max_set=3)  # alone and in sets
wfilter.untrain(wf, wfilter.InMemory(images, labels), recipe=recipe, steps=120)
wf.save(folder)

tokens, policy = {}, ""
for customer, forget in FORBIDDEN.items():
    tokens[customer], line = new_token()
    policy += f'[tenants.{customer}]\nforget = {forget}\ntokens = ["{line}"]\nburst = 1000\n\n'
(folder / "policy.toml").write_text(policy)
command = [sys.executable, "-m", "wfilter", "serve", str(folder), "--port", str(PORT)]
server = subprocess.Popen([*command, "--policy", str(folder / "policy.toml"), "--quiet"])


def wait_until_ready(seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz") as reply:
                assert json.load(reply)["ready"]
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not start.")


def ask(index: int) -> tuple[str, int, list[str]]:
    """The customer, the digit on the image, and the classes it was answered."""
    customer = list(FORBIDDEN)[index % 3]
    pixels, label = test.images[torch.tensor([index])][0, 0], int(test.labels[index])
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    answer = Client(f"http://127.0.0.1:{PORT}", tokens[customer]).classify(buffer.getvalue(), 10)
    return customer, label, [entry["class"] for entry in answer["top"]]


try:
    wait_until_ready()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
finally:
    server.terminate()
    server.wait()

for customer, forget in FORBIDDEN.items():
    mine = [(label, top) for who, label, top in answers if who == customer]
    kept = [(label, top) for label, top in mine if label not in forget]
    right = sum(top[0] == str(label) for label, top in kept) / len(kept)
    print(f"{customer}: {right:.1%} right on what it may recognise; {forget} never in an answer")
    assert right > 0.9
    assert not any(str(label) in top for _, top in mine for label in forget)
