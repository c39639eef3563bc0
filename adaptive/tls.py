"""The certificate authorities that are trusted: those of SSL_CERT_FILE or SSL_CERT_DIR if set, else the usual ones.

httpx reads these variables only together with those of proxies, which are ignored here (``trust_env``): a text must not
pass through another machine than the one that was named.
"""

from __future__ import annotations

import functools
import os
import ssl

import httpx

from checkpoints.errors import AdaptiveError, first_line


def trusted() -> ssl.SSLContext:
    """The context for all connections. Raises AdaptiveError if the authorities' certificates cannot be read."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    try:
        return _context(file, folder)
    except OSError as error:  # an SSLError is one too
        where = file or folder or "the usual ones"
        raise AdaptiveError(
            f"the certificates of the trusted authorities ({where}) cannot be read: {first_line(error)}; "
            "SSL_CERT_FILE must name a file of PEM certificates"
        ) from error


@functools.cache
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Read once for each pair of values, which takes some 20 ms."""
    return httpx.create_ssl_context()
