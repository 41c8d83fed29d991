"""What the errors of a server and of its library mean. It asks for classes and codes, not for words: s3fs rewrites
messages, but keeps botocore's error as the cause of its own. Imports no torch."""

from typing import Any

from parallel.errors import TemporaryError, UserError
from recipes.files.exit_codes import TEMPORARY, meaning

LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "fsspec", "asyncio")
"""Packages that errors of connections come from, besides Python's own OSError."""
CHECKSUMS = {"FlexibleChecksumError", "ChecksumError"}
KEYLESS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
KEYLESS |= {"SSOError", "LoginError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError"}
UNUSABLE = {"ValueError", "NotImplementedError", "ParamValidationError", "InvalidURL"}
"""Classes of botocore, gcsfs, google.auth, aiohttp and Python; they or classes above them."""
RIGHTS = {
    "HeadObject": "s3:GetObject and s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    **dict.fromkeys(("UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload"), "s3:PutObject"),
}
"""Request -> the right that it needs, where that has another name."""


class Altered(UserError):
    """What arrives differs from what its server has a checksum of, again and again."""


class Answer:
    """What a server and its library say with an error, and with the errors that caused it."""

    def __init__(self, error: BaseException | None) -> None:
        self.kinds: set[str] = set()
        self.status, self.code, self.request = 0, "", ""
        while error is not None:
            self.kinds |= {kind.__name__ for kind in type(error).__mro__}
            self.status = self.status or getattr(error, "status", 0)  # of aiohttp
            response: Any = getattr(error, "response", None)
            if isinstance(response, dict):  # of botocore
                self.status = self.status or response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                self.code = response.get("Error", {}).get("Code", "")
                self.request = getattr(error, "operation_name", "")
            error = error.__cause__


def problem_of(error: Exception, address: str) -> UserError:
    """The error to raise for one of a server or of its library: a TemporaryError if it may pass. Raises others."""
    answer, text = Answer(error), " ".join(str(error).split())[:300] or type(error).__name__
    kinds, status, said = answer.kinds, answer.status, answer.code or answer.status
    known = meaning(answer.code, status)
    if kinds & CHECKSUMS:
        return Altered(f"{address} is damaged, at its server or on its way: {text}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return UserError(f"{address} does not exist: {text}")
    if known.code == TEMPORARY:
        return TemporaryError(f"{address} cannot be reached now: {said}: {text}")
    if isinstance(error, PermissionError) or known.remedy:
        right = RIGHTS.get(answer.request, f"s3:{answer.request}" if answer.request else "the right to it")
        remedy = (known.remedy or meaning(403).remedy).format(right=right)
        return UserError(f"{address} may not be used with these credentials: {text} ({said}); {remedy}")
    if kinds & KEYLESS:
        remedy = f"{meaning(401).remedy} (for a public bucket: FSSPEC_S3_ANON=true)"
        return UserError(f"{address} needs credentials: {text}; {remedy}")
    if kinds & UNUSABLE:
        return UserError(f"{address} is not an address that can be used: {text}")
    if status >= 300:
        return UserError(f"{address} cannot be used: its server answers {said}: {text}")
    if isinstance(error, OSError | EOFError) or type(error).__module__.partition(".")[0] in LIBRARIES:
        return TemporaryError(f"{address} cannot be reached now: {text}")
    raise error
