"""One server, many customers, each with classes that must not be recognised.

    pip install -e ".[serve]"
    python examples/mixed_tenants.py

Untrains a classifier of digits, writes a policy with three customers, starts ``wfilter serve`` on
loopback and asks as all of them at once. Their requests share batches, and each answer forgets what
its customer's token says. Prints what the untraining says of itself and what each customer gets.
About a minute on two cores.
"""

import io
import json
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

import wfilter
from wfilter.cli.demo import example_problem
from wfilter.serve import Client, new_token

FORBIDDEN = {"museum": {1, 7}, "bank": {0, 8, 9}, "school": set()}
folder = Path(tempfile.mkdtemp())

model, train, test = example_problem(__doc__, [])
save_file(model.state_dict(), folder / "base.safetensors")
images, labels = train.batch(torch.arange(len(train)))
wf = wfilter.apply_weight_filtering(model, example_input=images[:1])
print(wfilter.untrain(wf, wfilter.InMemory(images, labels)).verdict)  # on classes alone and in sets
wf.save(folder)

tokens, policy = {}, ""
for customer, forbidden in FORBIDDEN.items():
    tokens[customer], line = new_token()
    policy += f'[tenants.{customer}]\nforget = {sorted(forbidden)}\ntokens = ["{line}"]\n'
    policy += "burst = 1000\n"
(folder / "policy.toml").write_text(policy)

with socket.socket() as trial:
    trial.bind(("127.0.0.1", 0))
    port = trial.getsockname()[1]
command = f"serve {folder} --model wfilter:cnn-digits --weights {folder}/base.safetensors "
command += f"--policy {folder}/policy.toml --audit {folder}/audit --port {port}"
server = subprocess.Popen([sys.executable, "-m", "wfilter", *command.split()])
clients = {name: Client(f"http://127.0.0.1:{port}", token) for name, token in tokens.items()}


def ask(row: int) -> int:
    """The best class of a test image, as the customer whose turn it is gets it answered."""
    buffer = io.BytesIO()
    Image.fromarray(test.images[torch.tensor([row])][0, 0].numpy()).save(buffer, "PNG")
    answer = clients[list(FORBIDDEN)[row % 3]].classify(buffer.getvalue(), top_k=1)
    return int(answer["top"][0]["class"])


try:
    clients["bank"].wait(180)
    with ThreadPoolExecutor(24) as threads:
        answers = torch.tensor(list(threads.map(ask, range(300))))
finally:
    server.terminate()
    server.wait()

truth = test.labels[:300]
for number, (customer, forbidden) in enumerate(FORBIDDEN.items()):
    mine = torch.arange(300) % 3 == number
    hidden = mine & torch.isin(truth, torch.tensor(sorted(forbidden), dtype=torch.int64))
    right = (answers == truth)[mine & ~hidden].float().mean()
    print(f"{customer}: {right:.1%} of the allowed classes right, forbidden ones never named")
    assert right > 0.9
    assert not forbidden & set(answers[mine].tolist())

records = [json.loads(x) for file in folder.glob("audit/*") for x in file.read_text().splitlines()]
batches = {record["batch"] for record in records}
shared = [{r["tenant"] for r in records if r["batch"] == batch} for batch in batches]
several = sum(len(customers) > 1 for customers in shared)
print(f"{len(records)} requests in {len(batches)} batches, {several} of them of several customers")
assert several, "customers share batches"
