"""``wfilter demo``: two small networks forget every digit, in about two minutes on two cores.

Uses scikit-learn's digits, which are real images and come with it, so it needs no network.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wfilter import data, metrics
from wfilter.cli import settings, untraining
from wfilter.core.attach import apply_weight_filtering
from wfilter.core.mask import Mask
from wfilter.core.model import FilteredModel
from wfilter.data import zoo
from wfilter.files import card
from wfilter.metrics.layers import forgets_by_gates
from wfilter.page import write_page
from wfilter.plots import pictures
from wfilter.untraining.history import History
from wfilter.untraining.loop import untrain
from wfilter.untraining.objectives import Recipe
from wfilter.untraining.recipes import AUTO, DISTILL_SOFT

FOLDER = "wfilter-demo"
MODELS = ("cnn-digits", "vit-digits")
RETRAINED = 3  # the class that the retrained model never sees
EPOCHS = {"cnn-digits": 8, "vit-digits": 25}
GATES = DISTILL_SOFT  # networks this small use every unit for several classes
STEPS = 200  # of untraining by gates alone; the default recipe finds its own number
BATCH_SIZE = 64
SHIFT = 1  # pixels by which every other image is moved: a thousand digits are few
# The paper filters only queries, keys and values; in four blocks of width 64 that costs two points.
TARGETS = {"vit-digits": ("blocks.*.attn.*", "blocks.*.mlp.*")}
EXAMPLE_MODELS = {"digits": "cnn-digits", "mnist": "resnet18-mnist", "cifar10": "resnet18-cifar"}

MEANING = (
    "Acc_r: % right on the classes to keep, higher is better; Acc_f: % right on the forgotten",
    "class, 0 is wanted; each class is forgotten in turn. The logit mask only hides the answer,",
    "the retrained model never saw its one class. Gates alone: where wfilter moves features, what",
    "gates do without that; the page is about them.",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Accuracies:
    """One method's line in the table: accuracies in 0..1."""

    method: str
    classes: str
    retain: float
    forget: float
    seconds: float


@dataclass(frozen=True)
class Shown:
    """One image of the mixed batch: what it is, what it forgets, and the two answers."""

    label: int
    forget: int
    before: int
    after: int


@dataclass(frozen=True)
class Outcome:
    """What the demo found for one network."""

    model: str
    folder: str
    lines: tuple[Accuracies, ...]
    batch: tuple[Shown, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def train_original(
    name: str, train: data.ImageSet, *, epochs: int | None = None, seed: int = 0
) -> nn.Module:
    """A network of the zoo trained on ``train``, in eval mode.

    Example:
        >>> type(train_original("cnn-digits", data.load("digits"), epochs=1)).__name__
        'VGG'
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = zoo.create(name, train.num_classes)
        _fit(model, data.batches(train, shuffle=True, seed=seed, batch_size=64), epochs, name)
    return model.eval()


def _fit(model: nn.Module, batches: data.ImageBatches, epochs: int | None, name: str) -> None:
    """Train the model in place, by AdamW with one cycle of the learning rate."""
    passes = EPOCHS.get(name, 12) if epochs is None else epochs
    rate = 4e-3 if name.startswith("vit") else 3e-3
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    total = passes * len(batches) + 1
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=total, pct_start=0.2)
    model.train()
    for _ in range(passes):
        for images, labels in batches:
            optimiser.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            cycle.step()


def example_problem(
    description: str = "", arguments: Sequence[str] | None = None
) -> tuple[nn.Module, data.ImageSet, data.ImageSet]:
    """What the examples start from: a trained classifier, its training and its test images.

    Args:
        description: Shown by ``--help``.
        arguments: ``--dataset`` (digits, mnist or cifar10) and ``--data``, the data folder; by
            default those of the command line. On cifar10 the folder also holds the weights.

    Example:
        >>> model, train, test = example_problem(arguments=["--dataset", "digits"])
        >>> len(train), len(test)
        (1438, 359)
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dataset", choices=tuple(EXAMPLE_MODELS), default="digits")
    parser.add_argument("--data", help="the data folder; default: $WFILTER_DATA")
    options = parser.parse_args(arguments)
    name = EXAMPLE_MODELS[options.dataset]
    image_format = vars(zoo.input_format(f"wfilter:{name}"))
    train = data.load(options.dataset, "train", options.data, **image_format)
    test = data.load(options.dataset, "test", options.data, **image_format)
    if options.dataset == "cifar10":
        weights = zoo.weights_path(f"wfilter:{name}", options.data)
        return zoo.load_weights(zoo.create(name), weights), train, test
    return train_original(name, train, epochs=6 if name == "cnn-digits" else 1), train, test


def demo(
    out: str | Path = FOLDER,
    *,
    models: Sequence[str] = MODELS,
    epochs: int | None = None,
    steps: int | None = None,
    pages: bool = True,
    say: Say = print,
    progress: bool | None = None,
) -> list[Outcome]:
    """Train each network, untrain all ten digits in one round, and write what came of it.

    Args:
        out: The folder to write, one sub-folder for each network.
        models: Names of the zoo.
        epochs: Of training; by default enough for about 97 % right.
        steps: Of untraining; by default as many as the default recipe finds it needs.
        pages: Also draw the pictures and the HTML pages.
        say: Told what happens, line by line.
        progress: Show progress bars; by default only on a terminal.
    """
    for name in models:
        if name not in MODELS:
            raise ValueError(f"the demo has no network {name!r}, only {' and '.join(MODELS)}.")
    train, test = data.load("digits"), data.load("digits", "test")
    say(f"scikit-learn's digits: {len(train)} images to train on, {len(test)} to test on.")
    outcomes = []
    for name in models:
        show = Show(name, train, test, Path(out) / name, epochs, steps, say, progress)
        outcomes.append(show.run(pages))
    return outcomes


@dataclass(frozen=True)
class DemoFilters:
    """Filters of one network: how they were made, and where they are written."""

    wf: FilteredModel
    history: History
    folder: Path
    recipe: Recipe
    steps: int | None


@dataclass
class Show:
    """The demo of one network, step by step."""

    name: str
    train: data.ImageSet
    test: data.ImageSet
    folder: Path
    epochs: int | None
    steps: int | None
    say: Say
    progress: bool | None

    def run(self, pages: bool) -> Outcome:
        """Train, untrain, measure and write; with ``pages`` also draw."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        self.say(f"\n{self.name}: training the original ...")
        began = time.perf_counter()
        model = train_original(self.name, self.train, epochs=self.epochs)
        trained = time.perf_counter() - began
        plain = copy.deepcopy(model)
        filters = self._untrain(model, self.folder, AUTO, self.steps)
        self.say(filters.history.verdict)
        lines = [
            self._line(metrics.Method.of_one("original", model, range(10)), trained),
            self._line_of(filters, "wfilter"),
            self._line(metrics.Method.of_models("logit mask", _masked(model)), 0.0),
            self._retrained(),
        ]
        gates = filters
        if not forgets_by_gates(filters.wf):
            gates = self._untrain(plain, self.folder / "gates", GATES, self.steps or STEPS)
            lines.insert(2, self._line_of(gates, "gates alone"))
        self.say(_table(lines))
        images, batch = self._mixed_batch(filters.wf)
        self.say(_batch_table(batch, self.test.class_names))
        save_file(dict(model.state_dict()), self.folder / "base.safetensors")
        for made in (filters, gates):
            self._write(made, lines)
        if pages:
            self._draw(gates, images, batch)
        return Outcome(self.name, str(self.folder), tuple(lines), batch)

    def _untrain(
        self, model: nn.Module, folder: Path, recipe: Recipe, steps: int | None
    ) -> DemoFilters:
        how = "in one round" if recipe is AUTO else "by gates alone, to see which units they take"
        self.say(f"{self.name}: untraining all {self.train.num_classes} classes {how} ...")
        wf = apply_weight_filtering(
            model,
            targets=TARGETS.get(self.name, "auto"),
            class_names=self.train.class_names,
            example_input=torch.zeros(1, *self.train.image_shape),
        )
        images = untraining.in_memory(self.train, BATCH_SIZE, SHIFT)
        history = untrain(wf, images, recipe=recipe, steps=steps, progress=self.progress)
        return DemoFilters(wf, history, folder, recipe, steps)

    def _line_of(self, filters: DemoFilters, name: str) -> Accuracies:
        method = metrics.Method.of_filtered(filters.wf, range(10), name)
        return self._line(method, filters.history.seconds)

    def _line(self, method: metrics.Method, seconds: float) -> Accuracies:
        """A method's accuracies on all test images, each of its classes forgotten in turn."""
        model, batches = method.model(method.classes[0]), data.batches(self.test)
        problem = metrics.Problem(model, batches, None, method.classes, self.test.num_classes)
        answers = metrics.answers(method, problem)
        every = len(method.classes) == self.test.num_classes
        which = "all 10" if every else f"only {', '.join(map(str, method.classes))}"
        return Accuracies(method.name, which, answers.retain.mean, answers.forget.mean, seconds)

    def _retrained(self) -> Accuracies:
        """The accuracies of a model trained as the original was, but without one class."""
        began = time.perf_counter()
        rest = self.train.take((self.train.labels != RETRAINED).nonzero()[:, 0])
        model = train_original(self.name, rest, epochs=self.epochs)
        seconds = time.perf_counter() - began
        return self._line(metrics.Method.of_models("retrained", {RETRAINED: model}), seconds)

    @torch.no_grad()
    def _mixed_batch(self, wf: FilteredModel) -> tuple[Tensor, tuple[Shown, ...]]:
        """One image of each digit; even digits forget their own class, odd ones another."""
        images, labels = self.test.batch(self._one_of_each(wf))
        forget = torch.where(labels % 2 == 0, labels, (labels + 4) % 10)
        before, after = wf(images).argmax(1), wf(images, forget=forget).argmax(1)
        columns = (labels.tolist(), forget.tolist(), before.tolist(), after.tolist())
        return images, tuple(Shown(*row) for row in zip(*columns))

    def _one_of_each(self, wf: FilteredModel) -> Tensor:
        """Position of each class's first test image that the base model gets right, else first."""
        images, labels = self.test.batch(torch.arange(len(self.test)))
        known: Tensor = wf(images).argmax(1) == labels
        fits = 2 * (labels == torch.arange(10)[:, None]).int() + known.int()  # (10, images)
        return fits.argmax(1)

    def _write(self, made: DemoFilters, lines: Sequence[Accuracies]) -> None:
        folder, history = made.folder, made.history
        folder.mkdir(parents=True, exist_ok=True)
        made.wf.save(folder)
        (folder / "history.json").write_text(history.to_json())
        made_with = {
            "model": f"wfilter:{self.name}",
            "weights": str(Path("." if folder == self.folder else "..", "base.safetensors")),
            "dataset": "digits",
        }
        plan = {
            "targets": TARGETS.get(self.name, ()),
            "batch_size": BATCH_SIZE,
            "shift": SHIFT,
            "recipe": made.recipe.to_dict(),
        }
        plan |= {} if made.steps is None else {"steps": made.steps}
        (folder / settings.FILE).write_text(settings.write({**made_with, **plan}))
        text = card.model_card(made.wf, self._card_lines(made), _markdown(lines))
        (folder / card.NAME).write_text(text, encoding="utf-8")

    def _card_lines(self, made: DemoFilters) -> dict[str, object]:
        lines = {
            "base model": f"wfilter:{self.name}, trained here; its weights are base.safetensors",
            "data": f"digits: {len(self.train)} images to train on, {len(self.test)} to test on",
            "recipe": f"{made.recipe.name}, {made.history.stopped}",
            "choices": "; ".join(made.history.choices),
            "verdict on held-out training images": made.history.verdict,
        }
        return {name: value for name, value in lines.items() if value}

    def _draw(self, made: DemoFilters, images: Tensor, batch: Sequence[Shown]) -> None:
        made.history.plot(self.folder / "history.png")
        self._draw_batch(images, batch)
        write_page(
            made.wf,
            self.test,
            self.folder / "page.html",
            title=f"What {self.name} forgets, and with which units",
            about={"data": "digits", "recipe": f"{made.recipe.name}, {made.history.stopped}"},
            history=made.history,
        )

    def _draw_batch(self, images: Tensor, batch: Sequence[Shown]) -> None:
        names = self.test.class_names
        captions = [f"{names[x.label]} without {names[x.forget]}: {names[x.after]}" for x in batch]
        pictures(images, self.folder / "mixed-batch.png", captions, columns=5)


def _masked(model: nn.Module) -> dict[int, nn.Module]:
    """Digit -> the model with that digit masked: it cannot give this answer."""
    return {row: nn.Sequential(model, Mask([row])) for row in range(10)}


def _table(lines: Sequence[Accuracies]) -> str:
    header = f"\n{'':12}{'classes':>9}{'Acc_r':>9}{'Acc_f':>9}{'seconds':>10}"
    body = [
        f"{x.method:12}{x.classes:>9}{100 * x.retain:9.2f}{100 * x.forget:9.2f}{x.seconds:10.1f}"
        for x in lines
    ]
    return "\n".join([header, *body, *(f"  {line}" for line in MEANING)])


def _markdown(lines: Sequence[Accuracies]) -> str:
    body = [
        f"| {x.method} | {x.classes} | {100 * x.retain:.2f} | {100 * x.forget:.2f} | "
        f"{x.seconds:.1f} |"
        for x in lines
    ]
    head = ["| method | classes | Acc_r | Acc_f | seconds |", "|---|---|---|---|---|"]
    return "\n".join([*head, *body, "", *MEANING])


def _batch_table(batch: Sequence[Shown], names: Sequence[str]) -> str:
    text = "\nOne batch, one forward; each image forgets a class of its own:\n"
    text += f"{'image of':>12}{'forgets':>9}{'before':>9}{'after':>9}\n"
    return text + "\n".join(
        f"{names[x.label]:>12}{names[x.forget]:>9}{names[x.before]:>9}{names[x.after]:>9}"
        for x in batch
    )


def farewell(out: str | Path, outcomes: Sequence[Outcome], pages: bool = True) -> str:
    """What was written, and what to try next.

    Example:
        >>> print(farewell("a", [Outcome("cnn-digits", "a/cnn-digits", (), ())]).splitlines()[1])
        Written to a: filters, weights and settings of each network, pictures and a page about it.
    """
    folder = outcomes[0].folder
    look = "".join(f"\n  open {x.folder}/page.html in a browser" for x in outcomes if pages)
    more = ", pictures and a page about it" if pages else ""
    return f"""
Written to {out}: filters, weights and settings of each network{more}.
What to try next:{look}
  wfilter evaluate {folder}
  wfilter bake {folder} --forget 3 --out without-3.safetensors
  wfilter export {folder} --out model.pt2
  wfilter plan timm:resnet18
  wfilter serve {folder} --playground"""
