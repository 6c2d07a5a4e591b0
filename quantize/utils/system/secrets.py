"""Text that is written down or shown, without the passwords in it."""

import re

# The user and password of a URL, up to the last @: a password may hold any character, an @ and a / too.
_USER = re.compile(r"(?<=://)(?:[^/?#:@\s]*:.*|[^/?#@\s]+)@", re.DOTALL)
# Parameters of a URL, and those of a connection string inside one of them, which are percent-encoded.
_PARAMETER = re.compile(
    r"((?:[?&;=]|%3B|%26)(?:\s|\+|%20)*(?:\w*password|passwd|pwd|\w*token|\w*secret)(?:=|%3D))"
    r"(?:(?!%3B|%26)[^&;\s'\"])+",
    re.IGNORECASE,
)


def hide_credentials(text: str) -> str:
    """Replace what stands before the host of each URL, and passwords among its parameters, by ***.

    A text with several URLs may lose what stands between them: too much is hidden rather than too little.
    """
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", text))
