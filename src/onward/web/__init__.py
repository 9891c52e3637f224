"""`page`: a folder with a page that trains a model in a browser, without a server behind it.

content.py is what the page trains: lowered parts, state, data and their description, and what people may draw;
places.py says where tensors are in files; writer.py writes the folder, with ONNX Runtime for browsers.
The page itself is in static/: HTML, CSS and modules of JavaScript, as they are served.
"""

from onward.web.writer import page

__all__ = ["page"]
