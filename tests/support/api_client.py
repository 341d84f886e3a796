"""Requests of tests to the admin API of one node."""

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

TIMEOUT_S = 20.0


class Refused(Exception):
    """The status and the error text of a refusal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class Api:
    """The admin port at a local port. A refusal raises `Refused`."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(self, method: str, path: str, body: object = None, **parameters: object) -> Any:
        query = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in parameters.items()
        }
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}" + (f"?{urlencode(query)}" * bool(query))
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise Refused(error.code, json.loads(error.read())["error"]) from None

    def get(self, path: str, **parameters: object) -> Any:
        return self.request("GET", path, **parameters)

    def post(self, path: str, body: object = None, **parameters: object) -> Any:
        return self.request("POST", path, body, **parameters)

    def delete(self, path: str, **parameters: object) -> Any:
        return self.request("DELETE", path, **parameters)
