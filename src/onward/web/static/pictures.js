// Conversion of drawings, photos and camera frames to inputs of the model, and back.

const STROKES = 280; // pixels of the longer side of an image in which strokes are detected

// Scale a box of a gray image to a target size, with the mean of the pixels under each target pixel. Pixels outside are 0.
export function resample(gray, width, height, box, targetWidth, targetHeight) {
  const result = new Float32Array(targetWidth * targetHeight);
  const [stepX, stepY] = [box.width / targetWidth, box.height / targetHeight];
  for (let y = 0; y < targetHeight; y++) {
    for (let x = 0; x < targetWidth; x++) {
      result[y * targetWidth + x] = mean(gray, width, height, box.x + x * stepX, box.y + y * stepY, stepX, stepY);
    }
  }
  return result;
}

function mean(gray, width, height, left, top, across, down) {
  let sum = 0;
  for (let y = Math.max(Math.floor(top), 0); y < Math.min(top + down, height); y++) {
    const rows = Math.min(y + 1, top + down) - Math.max(y, top);
    for (let x = Math.max(Math.floor(left), 0); x < Math.min(left + across, width); x++) {
      sum += gray[y * width + x] * rows * (Math.min(x + 1, left + across) - Math.max(x, left));
    }
  }
  return sum / (across * down);
}

// Return the bounding box of ink, or null if there is none.
export function inkBox(ink, width, height) {
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let at = 0; at < ink.length; at++) {
    if (ink[at] < 0.3) continue;
    const [x, y] = [at % width, Math.floor(at / width)];
    [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
  }
  return right < 0 ? null : { x: left, y: top, width: right - left + 1, height: bottom - top + 1 };
}

// Convert a drawing (ink of each pixel, from 0 to 1) to an input, scaled and centered like the images of the data.
export function fromInk(ink, width, height, picture) {
  const box = inkBox(ink, width, height);
  if (!box) return null;
  let frame = { x: 0, y: 0, width, height };
  if (picture.extent) {
    const side = Math.max(box.width, box.height) / picture.extent;
    const across = side * Math.min(picture.width / picture.height, 1);
    frame = { x: box.x + (box.width - across) / 2, y: box.y + (box.height - side) / 2, width: across, height: side };
  }
  const levels = resample(ink, width, height, frame, picture.width, picture.height);
  const most = picture.extent ? Math.max(...levels) : 1; // makes thin strokes as dark as wide ones
  const ofLight = picture.background === "low" ? (level) => level / most : (level) => 1 - level / most;
  return arrange([levels.map(ofLight)], picture);
}

// Convert pixels of a photo (RGBA, as of a canvas) in the size of the input.
export function fromPixels(pixels, picture) {
  const count = picture.width * picture.height;
  if (picture.channels === 3) {
    const plane = (channel) => Float32Array.from({ length: count }, (_, at) => pixels[at * 4 + channel] / 255);
    return arrange([0, 1, 2].map(plane), picture);
  }
  const gray = grayOf(pixels, count);
  const isOther = picture.background && (borderLevel(gray, picture) < 0.5 ? "low" : "high") !== picture.background;
  return arrange([isOther ? gray.map((value) => 1 - value) : gray], picture);
}

function grayOf(pixels, count) {
  const weights = [0.299 / 255, 0.587 / 255, 0.114 / 255];
  return Float32Array.from({ length: count }, (_, at) =>
    weights.reduce((sum, weight, channel) => sum + weight * pixels[at * 4 + channel], 0),
  );
}

// Return the ink of each pixel of a gray image of strokes on paper, dark on light or light on dark.
export function inkOf(gray, width, height) {
  const paper = borderLevel(gray, { width, height });
  const far = gray.map((level) => Math.abs(level - paper));
  const most = far.reduce((a, b) => Math.max(a, b), 0) || 1;
  return far.map((ink) => (ink / most < 0.25 ? 0 : ink / most)); // shades of the paper are below a quarter
}

function borderLevel(gray, { width, height }) {
  const border = Array.from(gray).filter((_, at) => {
    const [x, y] = [at % width, Math.floor(at / width)];
    return x === 0 || y === 0 || x === width - 1 || y === height - 1;
  });
  return border.sort((a, b) => a - b)[border.length >> 1];
}

// Convert planes of brightness, from 0 to 1, to the range and the layout of the input.
function arrange(planes, { layout, width, height, channels, low, high }) {
  const count = width * height;
  const values = new Float32Array(count * channels);
  for (let channel = 0; channel < channels; channel++) {
    const plane = planes[Math.min(channel, planes.length - 1)];
    for (let at = 0; at < count; at++) {
      const index = layout === "channels_first" ? channel * count + at : at * channels + channel;
      values[index] = low[channel] + plane[at] * (high[channel] - low[channel]);
    }
  }
  return values;
}

// Fill an ImageData with an input of the model, to display it.
export function toPixels(values, { layout, width, height, channels, low, high }, image) {
  const count = width * height;
  for (let at = 0; at < count; at++) {
    for (let channel = 0; channel < 3; channel++) {
      const from = Math.min(channel, channels - 1);
      const value = Number(values[layout === "channels_first" ? from * count + at : at * channels + from]);
      image.data[at * 4 + channel] = (255 * (value - low[from])) / (high[from] - low[from] || 1);
    }
    image.data[at * 4 + 3] = 255;
  }
  return image;
}

// ---- with a canvas ----

export function paint(canvas, values, picture) {
  canvas.width = picture.width;
  canvas.height = picture.height;
  const context = canvas.getContext("2d");
  context.putImageData(toPixels(values, picture, context.createImageData(picture.width, picture.height)), 0, 0);
}

// Convert an image or a video frame to an input. Strokes are detected if the data have strokes; else the center of the image is
// cropped to the aspect ratio of the input.
export function fromImage(source, picture) {
  const [width, height] = [source.videoWidth ?? source.width, source.videoHeight ?? source.height];
  if (picture.extent && (width !== picture.width || height !== picture.height)) {
    const values = fromStrokes(source, width, height, picture);
    if (values) return values;
  }
  const scale = Math.min(width / picture.width, height / picture.height);
  let canvas = draw(source, (width - picture.width * scale) / 2, (height - picture.height * scale) / 2, scale, picture);
  while (canvas.width >= 2 * picture.width) canvas = half(canvas); // one large step would skip pixels
  const { width: w, height: h } = picture;
  const last = Object.assign(document.createElement("canvas"), { width: w, height: h });
  const context = last.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, w, h); // behind transparent pixels
  context.drawImage(canvas, 0, 0, w, h);
  return fromPixels(context.getImageData(0, 0, w, h).data, picture);
}

function fromStrokes(source, fullWidth, fullHeight, picture) {
  const scale = Math.min(STROKES / Math.max(fullWidth, fullHeight), 1);
  const [width, height] = [fullWidth, fullHeight].map((side) => Math.max(Math.round(side * scale), 1));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  return fromInk(inkOf(grayOf(data, width * height), width, height), width, height, picture);
}

function draw(source, x, y, scale, { width, height }) {
  const [w, h] = [Math.max(Math.round(width * scale), 1), Math.max(Math.round(height * scale), 1)];
  const canvas = Object.assign(document.createElement("canvas"), { width: w, height: h });
  canvas.getContext("2d").drawImage(source, x, y, width * scale, height * scale, 0, 0, w, h);
  return canvas;
}

function half(canvas) {
  const [width, height] = [canvas.width >> 1, canvas.height >> 1];
  const smaller = Object.assign(document.createElement("canvas"), { width, height });
  smaller.getContext("2d").drawImage(canvas, 0, 0, width, height);
  return smaller;
}
