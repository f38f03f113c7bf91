"""Says in one line what went wrong with a hub, and what helps. Errors are known by their names: three HTTP clients raise them."""

from __future__ import annotations

from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS
from urllib.parse import urlsplit

from staticllm.errors import last_line

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_MOST_CAUSES = 8
_OF_DISKS = (ENOSPC, EDQUOT, EFBIG, EROFS, EIO)
"""Numbers of errors that come from a disk, also where no file is named."""


class NoHubError(Exception):
    """What answers does not answer as a hub does."""


def what_failed(error: BaseException, repo: str, revision: str = "") -> str:
    """Return the line about an error that ``huggingface_hub`` or its HTTP client has raised for a repository."""
    errors = _causes(error)
    names = {kind.__name__ for each in errors for kind in type(each).__mro__}
    hub = endpoint()
    if "OfflineModeIsEnabled" in names:
        return offline(repo)
    if "GatedRepoError" in names:
        return f"{repo} is gated: accept its terms at {hub}/{repo}, then {LOGIN}"
    if "RevisionNotFoundError" in names:
        return f"{repo} has no revision {revision or 'main'!r} at {hub}: check what follows the @"
    status = next((found for each in errors if (found := _status(each))), 0)
    if status:
        return _of_status(status, names, repo, hub)
    if "RepositoryNotFoundError" in names:
        return _not_found(repo, hub)
    return _without_answer(errors, names, hub)


def is_answer(error: BaseException) -> bool:
    """Return whether a hub has answered that it refuses: to ask again would not help."""
    return any(_status(each) or isinstance(each, NoHubError) for each in _causes(error))


def offline(repo: str) -> str:
    """Return the line about a model that is not in the cache, where the network must not be used."""
    return (
        f"{repo} is not in the cache of Hugging Face, and HF_HUB_OFFLINE is set: unset it, then staticllm pull {repo}"
    )


def endpoint() -> str:
    """Return the address of the hub, without a name and a password that may be in it."""
    from huggingface_hub import constants

    try:
        parts = urlsplit(constants.ENDPOINT)
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    except ValueError:
        return "the address in HF_ENDPOINT"
    return shown if shown.isprintable() else "the address in HF_ENDPOINT"


def _of_status(status: int, names: set[str], repo: str, hub: str) -> str:
    if status == 429:
        return f"{hub} refuses more requests for now (429): wait some minutes, or {LOGIN}"
    if status in (401, 403) and "RepositoryNotFoundError" not in names:
        return f"{hub} refuses {repo} to this user ({status}): {LOGIN}"
    if status in (401, 404):
        return _not_found(repo, hub)
    if status >= 500:
        return f"{hub} has failed ({status}): try again later"
    return f"{hub} refuses {repo} ({status}): check the name, and HF_ENDPOINT"


def _not_found(repo: str, hub: str) -> str:
    return f"there is no model {repo} at {hub}, or it is private: check the name, or {LOGIN}"


def _without_answer(errors: list[BaseException], names: set[str], hub: str) -> str:
    """Return the line about a hub that gave no answer, or none that can be read."""
    of_files = next(
        (each for each in errors if isinstance(each, OSError) and (each.filename or each.errno in _OF_DISKS)), None
    )
    if of_files is not None:
        reason = of_files.strerror
        return f"the cache of Hugging Face cannot be written ({reason}): free space there, or set HF_HOME to another folder"
    if any(isinstance(each, RecursionError) and "JSON" in str(each) for each in errors):
        names = {NoHubError.__name__}  # nested too deeply; other recursions follow redirects
    for known, line in _LINES:
        if names & known:
            return f"{line[0].format(hub=hub)}: {line[1]}"
    return f"{hub} cannot be used ({last_line(errors[0])[:200]}): check HF_ENDPOINT and the proxy"


_NETWORK = "check the network, the proxy and HF_ENDPOINT"
_LINES: tuple[tuple[frozenset[str], tuple[str, str]], ...] = (
    (frozenset(("TooManyRedirects", "RecursionError")), ("{hub} redirects without end", "check HF_ENDPOINT and the proxy")),
    (
        frozenset(("NewConnectionError", "ConnectError", "ConnectionRefusedError", "ProxyError", "SSLError")),
        ("there is no connection to {hub}", _NETWORK),
    ),
    (
        frozenset(("TimeoutException", "Timeout", "TimeoutError", "ReadTimeoutError")),
        ("{hub} does not answer", f"{_NETWORK}, and try again"),
    ),
    (
        frozenset(("ProtocolError", "ChunkedEncodingError", "ReadError", "WriteError", "ConnectionError")),
        ("the connection to {hub} broke", f"{_NETWORK}, and pull again, which goes on from there"),
    ),
    (
        frozenset(
            ("NoHubError", "FileMetadataError", "JSONDecodeError", "KeyError", "TypeError", "AttributeError", "InvalidURL",
             "UnsupportedProtocol", "MissingSchema", "InvalidSchema")
        ),
        ("what answers at {hub} is no Hugging Face hub", "check HF_ENDPOINT and the proxy"),
    ),
)  # fmt: skip
"""Names of errors, what they mean, and what helps; the first that is among an error's causes decides."""


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and those that it came from."""
    found = [error]
    while len(found) < _MOST_CAUSES and (more := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(more)
    return found


def _status(error: BaseException) -> int:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) and status >= 400 else 0
