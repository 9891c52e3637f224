// Pictures as the model takes them: drawings, photographs and frames of a camera become rows of numbers, and back.

const STROKES = 280; // pixels on the longer side of an image in which strokes are looked for

// The mean of the pixels of a box of a grey picture, for each pixel of a smaller one. Outside of it there is nothing.
export function resample(grey, width, height, box, targetWidth, targetHeight) {
  const result = new Float32Array(targetWidth * targetHeight);
  const [stepX, stepY] = [box.width / targetWidth, box.height / targetHeight];
  for (let y = 0; y < targetHeight; y++) {
    for (let x = 0; x < targetWidth; x++) {
      result[y * targetWidth + x] = mean(grey, width, height, box.x + x * stepX, box.y + y * stepY, stepX, stepY);
    }
  }
  return result;
}

function mean(grey, width, height, left, top, across, down) {
  let sum = 0;
  for (let y = Math.max(Math.floor(top), 0); y < Math.min(top + down, height); y++) {
    const rows = Math.min(y + 1, top + down) - Math.max(y, top);
    for (let x = Math.max(Math.floor(left), 0); x < Math.min(left + across, width); x++) {
      sum += grey[y * width + x] * rows * (Math.min(x + 1, left + across) - Math.max(x, left));
    }
  }
  return sum / (across * down);
}

// Where there is ink, as a box; null if there is none.
export function inkBox(ink, width, height) {
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let at = 0; at < ink.length; at++) {
    if (ink[at] < 0.3) continue;
    const [x, y] = [at % width, Math.floor(at / width)];
    [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
  }
  return right < 0 ? null : { x: left, y: top, width: right - left + 1, height: bottom - top + 1 };
}

// A drawing (how much ink there is at each pixel, from 0 to 1) as the model takes it: of the size, and in the middle, as
// pictures are in the data.
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
  const most = picture.extent ? Math.max(...levels) : 1; // thin strokes are as dark as others
  const ofLight = picture.background === "low" ? (level) => level / most : (level) => 1 - level / most;
  return arrange([levels.map(ofLight)], picture);
}

// Pixels of a photograph (RGBA, as a canvas gives them) that has the size of the picture.
export function fromPixels(pixels, picture) {
  const count = picture.width * picture.height;
  if (picture.channels === 3) {
    const plane = (channel) => Float32Array.from({ length: count }, (_, at) => pixels[at * 4 + channel] / 255);
    return arrange([0, 1, 2].map(plane), picture);
  }
  const grey = greyOf(pixels, count);
  const isOther = picture.background && (borderLevel(grey, picture) < 0.5 ? "low" : "high") !== picture.background;
  return arrange([isOther ? grey.map((value) => 1 - value) : grey], picture);
}

function greyOf(pixels, count) {
  const weights = [0.299 / 255, 0.587 / 255, 0.114 / 255];
  return Float32Array.from({ length: count }, (_, at) =>
    weights.reduce((sum, one, channel) => sum + one * pixels[at * 4 + channel], 0),
  );
}

// How much ink is at each pixel of a grey picture of strokes on paper, whichever of them is darker.
export function inkOf(grey, width, height) {
  const paper = borderLevel(grey, { width, height });
  const far = grey.map((level) => Math.abs(level - paper));
  const most = far.reduce((a, b) => Math.max(a, b), 0) || 1;
  return far.map((one) => (one / most < 0.25 ? 0 : one / most)); // paper has shades, too
}

function borderLevel(grey, { width, height }) {
  const border = Array.from(grey).filter((_, at) => {
    const [x, y] = [at % width, Math.floor(at / width)];
    return x === 0 || y === 0 || x === width - 1 || y === height - 1;
  });
  return border.sort((a, b) => a - b)[border.length >> 1];
}

// Planes of light, from 0 to 1, as numbers of the model's range in its order.
function arrange(planes, { layout, width, height, channels, low, high }) {
  const count = width * height;
  const values = new Float32Array(count * channels);
  for (let channel = 0; channel < channels; channel++) {
    const plane = planes[Math.min(channel, planes.length - 1)];
    for (let at = 0; at < count; at++) {
      const place = layout === "channels_first" ? channel * count + at : at * channels + channel;
      values[place] = low[channel] + plane[at] * (high[channel] - low[channel]);
    }
  }
  return values;
}

// What the model gets, as something to look at: fills an ImageData.
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

// A sample out of an image or a frame of a video. Where the model takes strokes, those are looked for; else it is the middle
// of the image, as far as that has the form of the picture.
export function fromImage(source, picture) {
  const [width, height] = [source.videoWidth ?? source.width, source.videoHeight ?? source.height];
  if (picture.extent && (width !== picture.width || height !== picture.height)) {
    const found = fromStrokes(source, width, height, picture);
    if (found) return found;
  }
  const scale = Math.min(width / picture.width, height / picture.height);
  let canvas = draw(source, (width - picture.width * scale) / 2, (height - picture.height * scale) / 2, scale, picture);
  while (canvas.width >= 2 * picture.width) canvas = half(canvas); // smoothly: one large step would skip pixels
  const { width: w, height: h } = picture;
  const last = Object.assign(document.createElement("canvas"), { width: w, height: h });
  const context = last.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, w, h); // behind what is transparent
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
  return fromInk(inkOf(greyOf(data, width * height), width, height), width, height, picture);
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
