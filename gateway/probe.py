"""``python -m gateway.probe``: whether the gateway of this container answers, for the health probe of its image.

Knows the environment that both share; does not know whether orchestrators serve.
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Mapping


def answers(environment: Mapping[str, str]) -> bool:
    port = int(environment["SPECDEC_PORT"])
    if environment.get("SPECDEC_TLS_CERT"):
        context = ssl.create_default_context()
        # It asks itself, by an address that no certificate is issued for.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=5, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(0 if answers(os.environ) else 1)
