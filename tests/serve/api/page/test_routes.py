"""What the page's files are sent with, and that they need nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import pytest

from tests.serve.serving import Served
from treadle.serve.api.page import FILES, PATHS


def test_everything_that_the_page_loads_is_there(scripted: Callable[..., Served]) -> None:
    server = scripted("x", api_key="k")
    for path in sorted(PATHS):
        answer = server.http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert server.http.get("/").headers["content-type"] == "text/html; charset=utf-8"
    loaded = set(re.findall(r'(?:href|src)="(.*?)"', server.http.get("/").text))
    modules = set(re.findall(r'from "\./(.*?)"', "".join(server.http.get(path).text for path in PATHS)))
    assert {f"/{path}" for path in loaded} | {f"/page/{name}" for name in modules} | {"/"} == PATHS


def test_other_paths_need_the_key_and_are_no_files(scripted: Callable[..., Served]) -> None:
    server = scripted("x", api_key="k")
    for path in ("/state", "/page/routes.py", "/page/..%2fapp.py", "/page/index.html", "/page/", "/page"):
        assert server.http.get(path).status_code == 401, path
    key = {"Authorization": "Bearer k"}
    assert server.http.get("/state", headers=key).json()["status"] == "ok"
    for path in ("/page/routes.py", "/page/..%2fapp.py", "/page/__init__.py", "/page/index.html"):
        assert server.http.get(path, headers=key).status_code == 404, path


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_is_loaded_from_elsewhere_or_made_of_text(name: str) -> None:
    text = files("treadle.serve.api.page").joinpath(name).read_text("utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"<script(?! type=\"module\" src)|<style|\son\w+=|\sstyle=", text)
