"""The page at /: a chat with the model, and the live state of its server. The files beside this one are sent as is.

It needs nothing from elsewhere: no fonts, no libraries, no network but this server. Anyone may load it, as it holds no
secret; what it shows comes from /state and the API, which want the key.
"""

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "state.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PATHS = frozenset(["/", *(f"/page/{name}" for name in FILES if name != "index.html")])
