"""Filters on the Hugging Face Hub: thin calls on huggingface_hub, which keeps tokens and cache.

An address is ``hf://owner/name``, or ``hf://owner/name@revision`` for a branch, tag or commit.
"""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "hf://"
ADDRESS = re.compile(r"hf://([^/@\s]+/[^/@\s]+)(?:@(\S+))?")


def parse(address: str) -> tuple[str, str | None]:
    """The repository and the revision of an address.

    Example:
        >>> parse("hf://someone/digits@v1")
        ('someone/digits', 'v1')
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None:
        raise ValueError(
            f"{address!r} is no address on the Hub. Write hf://owner/name or "
            "hf://owner/name@revision."
        )
    return parts.group(1), parts.group(2)


def fetch(address: str, file: str) -> Path:
    """One file of a repository, downloaded or from the cache.

    Raises:
        FileNotFoundError: There is no such repository, revision or file, or none can be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = parse(address)
    try:
        return Path(hf_hub_download(repo, file, revision=revision, library_name="wfilter"))
    except LocalEntryNotFoundError as error:  # a subclass of EntryNotFoundError, so it comes first
        raise FileNotFoundError(
            f"{address} is not in the cache and the Hub cannot be reached. Check the network, or "
            "load from a folder: wfilter.load(folder, model)."
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{address} has no {file}. Filters are put there by wf.push_to_hub({repo!r})."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"{address} does not exist, or is not open to you. Check owner, name and revision; "
            "for a private repository log in with `hf auth login`."
        ) from error


def upload(
    folder: Path, repo_id: str, *, private: bool | None, revision: str | None, message: str
) -> str:
    """Put a folder in a repository, which is made if there is none; returns the commit's address.

    huggingface_hub finds the token (``hf auth login`` or the environment); none is passed here.
    """
    from huggingface_hub import HfApi

    repo, _ = parse(PREFIX + repo_id)  # refuses what is no owner/name before anything is made
    api = HfApi(library_name="wfilter")
    api.create_repo(repo, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo, branch=revision, exist_ok=True)
    info = api.upload_folder(
        repo_id=repo, folder_path=folder, commit_message=message, revision=revision
    )
    return str(info.commit_url)
