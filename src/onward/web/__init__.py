"""`page`: a folder with a page that trains a model in a browser, without a server behind it.

content.py is what the page trains: lowered parts, state, data and their description; columns.py packs data,
pictures.py says what people may draw, places.py where tensors are in files; runtime.py gets ONNX Runtime for browsers.
The page itself is in static/: HTML, CSS and modules of JavaScript, as they are served.
"""

from onward.web.writer import page

__all__ = ["page"]
