"""Hands a Hugging Face folder to the hub. Imports no torch."""

from pathlib import Path

from parallel.errors import UserError
from recipes.data.text.hub_name import silence_library
from recipes.data.text.row import reason
from recipes.weights.locate import find_weights


def upload_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as the model OWNER/MODEL, which is created if it is missing. Returns its address.

    Raises UserError for what is no Hugging Face folder, for a wrong name, and if the hub cannot be reached or refuses.
    """
    weights = find_weights(folder)
    if weights.is_checkpoint:
        raise UserError(f"{folder} is a checkpoint; export it first: convert_hf.py export {folder} NEW_FOLDER")
    _ = weights.stored_tensors  # whole, or else refused
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    silence_library()
    try:
        if name.count("/") != 1:
            raise HFValidationError("it must be OWNER/MODEL")
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name on the hub: {reason(error)}") from None
    api = HfApi()
    try:
        # Nothing is changed in a repository that exists, and it keeps its visibility.
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # any error of whichever network library is in use
        raise UserError(
            f"{folder} was not uploaded: {reason(error)}; log in with 'hf auth login' on a machine that reaches the"
            " hub, and run the same command again"
        ) from error
    return address
