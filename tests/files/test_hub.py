"""Filters on the Hub, with huggingface_hub's own functions replaced by a folder: no network."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from torch import nn

import wfilter
from wfilter.files import hub


def filters() -> wfilter.FilteredModel:
    torch.manual_seed(0)
    wf = wfilter.apply_weight_filtering(nn.Linear(4, 3), targets="*", class_names=list("abc"))
    nn.init.normal_(wf.alphas)
    return wf


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Path:
    """A Hub in a folder: repository -> revision -> files."""

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        (tmp_path / repo_id / "main").mkdir(parents=True, exist_ok=exist_ok)
        (tmp_path / repo_id / "private").write_text(str(private))

    def create_branch(self, repo_id, *, branch, exist_ok=False):
        (tmp_path / repo_id / branch).mkdir(exist_ok=exist_ok)

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision=None):
        place = tmp_path / repo_id / (revision or "main")
        shutil.copytree(folder_path, place, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{commit_message}")

    def hf_hub_download(repo_id, filename, *, revision=None, library_name=None):
        path = tmp_path / repo_id / (revision or "main") / filename
        if not path.is_file():
            raise errors.EntryNotFoundError(filename)
        return str(path)

    for function in (create_repo, create_branch, upload_folder):
        monkeypatch.setattr(huggingface_hub.HfApi, function.__name__, function)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return tmp_path


def test_what_is_pushed_is_loaded_again_with_the_same_answers(stored):
    wf, images = filters(), torch.rand(5, 4)
    wf.push_to_hub("someone/linear", private=True, message="first")
    expected = wf(images, forget=2)
    again = wfilter.load("hf://someone/linear", wfilter.remove_weight_filtering(wf))
    assert torch.equal(again(images, forget=2), expected)
    assert again.class_names == ("a", "b", "c")
    assert (stored / "someone/linear/private").read_text() == "True"


def test_the_base_model_is_not_pushed(stored):
    filters().push_to_hub("someone/linear")
    names = {path.name for path in (stored / "someone/linear/main").iterdir()}
    assert names == {"filters.safetensors", "README.md"}


def test_the_card_says_how_to_load_and_shows_the_report(stored):
    report = SimpleNamespace(to_markdown=lambda: "| method | probe f |\n|---|---|")
    address = filters().push_to_hub("someone/linear", report=report)
    card = (stored / "someone/linear/main/README.md").read_text()
    assert address == "https://hub/someone/linear/commit/Add weight filters"
    assert 'wfilter.load("hf://someone/linear", model)' in card
    assert "| method | probe f |" in card
    assert card.startswith("---\nlibrary_name: wfilter\n")


def test_a_card_without_a_report_says_that_nothing_was_measured(stored):
    filters().push_to_hub("someone/linear")
    assert (
        "Not measured on test images yet" in (stored / "someone/linear/main/README.md").read_text()
    )


def test_a_revision_has_its_own_filters(stored):
    wf, images = filters(), torch.rand(5, 4)
    wf.push_to_hub("someone/linear", revision="v1")
    first = wf(images, forget=0)
    nn.init.normal_(wf.alphas)
    wf.push_to_hub("someone/linear")
    model = wfilter.remove_weight_filtering(wf)
    again = wfilter.load("hf://someone/linear@v1", model)
    assert torch.equal(again(images, forget=0), first)
    assert "hf://someone/linear@v1" in (stored / "someone/linear/v1/README.md").read_text()


def test_filters_of_another_base_model_are_refused(stored):
    filters().push_to_hub("someone/linear")
    with pytest.raises(ValueError, match="made for another base model"):
        wfilter.load("hf://someone/linear", nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["linear", "a/b/c", "a b/c", "", "https://hub/a/b"])
def test_what_is_no_owner_and_name_is_refused_before_anything_is_made(stored, name):
    with pytest.raises(ValueError, match=r"Write hf://owner/name"):
        filters().push_to_hub(name)
    with pytest.raises(ValueError, match=r"Write hf://owner/name"):
        wfilter.load(f"hf://{name}", nn.Linear(4, 3))
    assert list(stored.iterdir()) == []


def test_a_repository_without_filters_says_how_they_get_there(stored):
    with pytest.raises(FileNotFoundError, match=r"has no filters.safetensors. Filters are put"):
        wfilter.load("hf://someone/else", nn.Linear(4, 3))


def answer(status: int):
    """An answer of a server, of the kind this huggingface_hub builds its errors from."""
    return SimpleNamespace(status_code=status, headers={}, request=None, text="")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: errors.LocalEntryNotFoundError("offline"), "the Hub cannot be reached"),
        (lambda: errors.RepositoryNotFoundError("no", response=answer(404)), "hf auth login"),
        (lambda: errors.RevisionNotFoundError("no", response=answer(404)), "and revision"),
    ],
)
def test_faults_of_the_hub_are_told_in_words(monkeypatch, error, said):
    def fail(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(FileNotFoundError, match=said):
        hub.fetch("hf://someone/linear", "filters.safetensors")


def test_the_functions_replaced_here_take_these_arguments():
    import inspect

    api = huggingface_hub.HfApi
    for function, names in {
        huggingface_hub.hf_hub_download: ("repo_id", "filename", "revision", "library_name"),
        api.create_repo: ("repo_id", "private", "exist_ok"),
        api.create_branch: ("repo_id", "branch", "exist_ok"),
        api.upload_folder: ("repo_id", "folder_path", "commit_message", "revision"),
    }.items():
        assert set(names) <= set(inspect.signature(function).parameters), function.__name__
