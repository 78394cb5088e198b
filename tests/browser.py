"""A real Chromium without a screen, driven over the DevTools protocol through a pipe: no driver, no download.

    with Browser(folder) as browser:
        tab = browser.open("http://127.0.0.1:8000/")
        tab.until("document.title !== ''")

The protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON, each ended by a zero byte, that
the browser reads from its file descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0  # that anything may take; what is waited for comes as an event, so this only ends a failure


def find_chromium() -> str | None:
    """Return the path of the browser, or None. CHROMIUM names another one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One browser process with tabs that share nothing."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes the profile. Raises RuntimeError where there is no Chromium."""
        program = find_chromium()
        if program is None:
            raise RuntimeError("no Chromium was found; install it, on Debian by `apt-get install chromium`")
        (read_theirs, self._write), (self._read, write_theirs) = os.pipe(), os.pipe()
        command = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            "--disable-component-update", "--no-proxy-server", "--hide-scrollbars", f"--user-data-dir={folder}",
        ]  # fmt: skip
        # The descriptors must be 3 and 4 in the browser: a shell puts them there, and is replaced by it.
        redirect = f'exec "$0" "$@" 3<&{read_theirs} 4>&{write_theirs}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", redirect, program, *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[read_theirs, write_theirs], start_new_session=True,
        )  # fmt: skip
        os.close(read_theirs)
        os.close(write_theirs)
        self._number = 0
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def open(self, address: str, width: int = 1200, height: int = 800, dark: bool = False) -> Tab:
        """Return a new tab, in a profile of its own, once it has loaded `address`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.shape(width, height, dark)
        tab.go(address)
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command. Raises RuntimeError for what the browser refuses, or its end."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
            message = {"id": number, "method": method, "params": parameters}
            content = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
            while content:
                content = content[os.write(self._write, content) :]
        try:
            found = answer.get(timeout=SECONDS)
        except queue.Empty:
            raise RuntimeError(f"the browser gave no answer to {method}") from None
        finally:
            del self._answers[number]
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def _receive(self) -> None:
        rest = b""
        while piece := os.read(self._read, 1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    waiting = self._answers.get(message["id"])
                    if waiting is not None:
                        waiting.put(message)
                elif message.get("sessionId") in self._tabs:
                    self._tabs[message["sessionId"]].take(message["method"], message["params"])
        for waiting in list(self._answers.values()):
            waiting.put({"error": {"message": "the browser has ended"}})

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tab:
    """A page that can be looked at and typed into."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self._loaded: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.requested: list[str] = []  # the address of everything that was loaded
        self.problems: list[str] = []  # errors and warnings of the console, with what a policy refused

    def take(self, method: str, event: dict[str, Any]) -> None:
        """Note an event. Called in the thread that receives."""
        if method == "Page.loadEventFired":
            self._loaded.put(None)
        elif method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.problems.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def go(self, address: str) -> None:
        """Load an address."""
        self.call("Page.navigate", url=address)
        self._loaded.get(timeout=SECONDS)

    def shape(self, width: int, height: int, dark: bool = False) -> None:
        """Give the page a size and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true; it is looked at with every frame."""
        look = f"""new Promise((done, fail) => {{
            const end = performance.now() + {1000 * SECONDS / 2};
            const look = () => ({expression}) ? done() : performance.now() > end ? fail(new Error("never")) :
                requestAnimationFrame(look);
            look();
        }})"""
        try:
            self.value(look)
        except RuntimeError as error:
            shown = self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{error}\n{self.problems}\n{shown}") from None

    def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element."""
        at = self.value(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;"
            "return element.contains(document.elementFromPoint(x, y)) ? [x, y] : null; })()"
        )
        if at is None:
            raise AssertionError(f"{selector} cannot be clicked: it is out of view or covered")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press Enter, Escape or Tab."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
