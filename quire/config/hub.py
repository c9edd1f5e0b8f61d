"""Models of the Hugging Face hub, fetched into its cache: a repository's directory, or one of its GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ModelLoadError
from quire.utils.failures import explain, one_line
from quire.utils.gguf import SUFFIX, parts_of

TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
SUBDIRECTORIES = ("*/*.bin", "*/*.safetensors", f"*/*{SUFFIX}", "*/*/*")
"""Files to skip: other formats of the same weights."""
USUAL_TAG = "Q4_K_M"
MAX_LISTED = 8
"""Limit of files named in an error."""
NO_LANGUAGE_MODEL = "mmproj"
"""Prefix of the names of image-tower files."""

_TAGGED = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")

_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)(?P<tag>:[\w.-]+)?"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[\w.-]+)(?:/(?:[^?#]*/)?(?P<file>[^/?#]*))?)?/?(?:[?#].*)?"
)


def read_page(name: str, revision: str | None) -> tuple[str, str | None]:
    """(hub id, revision) of `name`, which may be a web address of a repository, branch or GGUF file. Other names stay.
    A given revision overrides the page's."""
    page = _PAGE.fullmatch(name.strip())
    if page is None:
        return name, revision
    file = page["file"] or ""
    tag = f":{file[: -len(SUFFIX)]}" if file.lower().endswith(SUFFIX) else page["tag"] or ""
    branch = None if page["revision"] == "main" else page["revision"]
    return page["id"] + tag, revision or branch


def looks_like_a_path(name: str) -> bool:
    """True if `name`, which does not exist, was meant as a path, by its beginning, slashes or ending."""
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.lower().endswith(SUFFIX)


def fetch(name: str, revision: str | None, config_only: bool, download_dir: str | None = None) -> Path:
    """Fetch a repository and return its directory, or for "org/repo:Q4_K_M" its GGUF file with that ending (the first
    of a split model). A repository org/repo-GGUF without config.json holds GGUF files; default Q4_K_M. config_only: no
    weights of a directory. Raises ModelLoadError of one line."""
    place = (revision, download_dir)
    tagged = _TAGGED.fullmatch(name)
    if tagged is not None:
        return _fetch_gguf(tagged[1], tagged[2], place)
    with _refusing(name):
        path = _snapshot(name, place, *TEXT_PATTERNS, *(() if config_only else ("*.safetensors",)))
        if not (path / "config.json").exists() and name.upper().endswith("-GGUF"):
            return _fetch_gguf(name, USUAL_TAG, place)
        if not config_only and not any(path.glob("*.safetensors")):
            path = _snapshot(name, place, *TEXT_PATTERNS, "*.bin")
    return path


def fetch_adapter(name: str) -> Path:
    """Fetch an adapter's repository and return its directory. Raises ModelLoadError of one line."""
    with _refusing(name):
        return _snapshot(name, (None, None), "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def _fetch_gguf(name: str, tag: str, place: tuple[str | None, str | None]) -> Path:
    endings = {f"*{each}{end}" for each in (tag, tag.lower(), tag.upper()) for end in (SUFFIX, f"-*-of-*{SUFFIX}")}
    with _refusing(name):
        path = _snapshot(name, place, *sorted(endings))
    found = [file for ending in endings for file in path.glob(ending) if not file.name.startswith(NO_LANGUAGE_MODEL)]
    files = sorted(set(found))
    if not files:
        raise ModelLoadError(f"the hub's {name!r} has no file *{tag}{SUFFIX}")
    if len(files) > 1 and files != parts_of(files[0]):
        names = ", ".join(file.name for file in files[:MAX_LISTED]) + (", ..." if len(files) > MAX_LISTED else "")
        raise ModelLoadError(f"the hub's {name!r} has {len(files)} files *{tag}{SUFFIX}: {names}; name more of its end")
    return files[0]


def _snapshot(name: str, place: tuple[str | None, str | None], *patterns: str) -> Path:
    # Imported here: the import takes a tenth of a second, which local models need not wait for.
    import huggingface_hub

    revision, download_dir = place
    return Path(
        huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(SUBDIRECTORIES),
        )
    )


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        yield
    except HFValidationError:
        raise ModelLoadError(f"model {name!r} is neither a directory nor a well-formed hub id") from None
    except GatedRepoError:
        raise ModelLoadError(
            f"model {name!r} is gated: accept its terms on its page of the hub, and set HF_TOKEN to a token of yours"
        ) from None
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"model {name!r} is neither a directory nor on the hub (a private one needs HF_TOKEN)"
        ) from None
    except ModelLoadError:
        raise
    except (OSError, HfHubHTTPError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"model {name!r} is neither a directory nor a reachable hub id: {one_line(reason)}"
        ) from None
    except Exception as error:  # of what the library takes an answer for that is not the hub's
        raise ModelLoadError(f"model {name!r}: the hub's answer cannot be used: {explain(error)}") from None
