"""Page that trains a model in a browser, as a folder for any static web server.

content.py collects what the page trains: lowered parts, state, data and their description;
offsets.py locates state in the bytes of models; writer.py writes the folder, with ONNX Runtime for
browsers. The page itself, HTML, CSS and JavaScript modules, is in static/.
"""

from onward.web.writer import page

__all__ = ["page"]
