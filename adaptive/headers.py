"""What headers of HTTP requests say, to the server and to the proxy alike."""

from __future__ import annotations


def session_name(header: bytes) -> str:
    """The session that a header names. Most clients write UTF-8, some Latin-1."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")
