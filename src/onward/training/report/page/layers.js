// Charts with a row or a picture for each layer: a map of gradient norms, and histograms of weights.

const SHADES = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37],
];

/** A colour between dark violet (0) and yellow (1), of even lightness steps. */
function shade(part) {
  const place = Math.min(Math.max(part, 0), 1) * (SHADES.length - 1);
  const index = Math.min(Math.floor(place), SHADES.length - 2);
  return SHADES[index].map((value, i) => Math.round(value + (place - index) * (SHADES[index + 1][i] - value)));
}

/** A picture of one pixel for each cell, as an address of data. */
function pixels(rows, low, high) {
  const surface = document.createElement("canvas");
  [surface.width, surface.height] = [rows[0].length, rows.length];
  const context = surface.getContext("2d");
  const picture = context.createImageData(surface.width, surface.height);
  const from = Math.log(low), width = Math.log(high) - from || 1;
  rows.flat().forEach((value, i) => {
    if (value !== null) picture.data.set([...shade((Math.log(value) - from) / width), 255], 4 * i);
  });
  context.putImageData(picture, 0, 0);
  return surface.toDataURL();
}

class GradientMap {
  constructor(figure, data, run, crosshair) {
    Object.assign(this, { figure, data, run, crosshair });
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector(".legend");
    const values = data.rows.flat().filter((value) => value !== null);
    this.low = values.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = values.reduce((a, b) => Math.max(a, b), 0);
    this.drawn = values.length > 0 ? pixels(data.rows, this.low, this.high) : null;
    crosshair.charts.push(this);
  }

  redraw() {
    const { names, rows } = this.data;
    const width = Math.max(this.plot.clientWidth, 220), letters = width < 520 ? 16 : 34;
    const row = Math.min(Math.max(Math.floor(420 / rows.length), 11), 22), bottom = rows.length * row + 4;
    const svg = this.svg = canvas(this.plot, width, bottom + 62, "gradient norms by layer");
    const short = names.map((name) => (name.length > letters ? `…${name.slice(1 - letters)}` : name));
    const left = 12 + 6.3 * Math.max(...short.map((name) => name.length));
    const x = this.x = scale(0, rows[0].length, left, width - 10);
    if (this.drawn) {
      const place = { x: left, y: 4, width: x.to - left, height: bottom - 4, preserveAspectRatio: "none" };
      draw(svg, "image", { ...place, href: this.drawn });
    }
    short.forEach((name, i) => {
      const text = draw(svg, "text", { x: left - 7, y: 4 + (i + 0.5) * row + 4, "text-anchor": "end" }, name);
      draw(text, "title", {}, names[i]);
    });
    this.steps(svg, bottom);
    this.key(svg, left, bottom + 34, Math.min(260, x.to - left));
    this.cell = draw(svg, "rect", { class: "cell", visibility: "hidden", height: row, y: 0, rx: 1 });
    this.row = row;
    this.listen(svg, width);
    this.show(null);
  }

  steps(svg, bottom) {
    const starts = this.data.x, last = starts.length - 1;
    for (const tick of linearTicks(starts[0], starts[last], Math.max(2, Math.floor((this.x.to - this.x.from) / 90)))) {
      const next = Math.max(starts.findIndex((start) => start >= tick), 0);
      const part = next > 0 ? (starts[next] - tick) / (starts[next] - starts[next - 1]) : 0;
      const at = this.x(next - part);
      draw(svg, "text", { x: at, y: bottom + 17, "text-anchor": "middle" }, label(tick));
      draw(svg, "line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, class: "axis-line" });
    }
  }

  /** Which colour means which norm. */
  key(svg, left, top, width) {
    for (let i = 0; i < 40; i++) {
      const at = { x: left + (i * width) / 40, y: top, width: width / 40 + 0.6, height: 8 };
      draw(svg, "rect", { ...at, fill: `rgb(${shade(i / 39).join(" ")})` });
    }
    draw(svg, "text", { x: left, y: top + 22 }, readable(this.low, 2));
    draw(svg, "text", { x: left + width, y: top + 22, "text-anchor": "end" }, readable(this.high, 2));
  }

  listen(svg, width) {
    this.crosshair.listen(svg, (pixel) => this.data.x[this.column((pixel / svg.clientWidth) * width)]);
    const follow = svg.onpointermove;
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const index = Math.floor((((event.clientY - box.top) / box.width) * width - 4) / this.row);
      this.index = Math.min(Math.max(index, 0), this.data.rows.length - 1);
      follow(event);
    };
  }

  column(pixel) {
    return Math.min(Math.max(Math.floor(this.x.invert(pixel)), 0), this.data.x.length - 1);
  }

  show(step) {
    this.cell.setAttribute("visibility", step === null ? "hidden" : "visible");
    this.readout.textContent = step === null ? "geometric means, on a logarithmic scale" : "";
    if (step === null) return;
    const index = this.index || 0;
    let column = nearest(this.data.x, step);
    if (this.data.x[column] > step && column > 0) column -= 1;
    this.cell.setAttribute("x", this.x(column));
    this.cell.setAttribute("width", Math.max(this.x(1) - this.x(0), 2));
    this.cell.setAttribute("y", 4 + index * this.row);
    this.readout.append(`${this.data.names[index]} `);
    make(this.readout, "b", "", readable(this.data.rows[index][column]));
    make(this.readout, "span", "at", this.crosshair.place(this.data.x[column]));
  }
}

class Ridges {
  constructor(figure, layer) {
    Object.assign(this, { figure, layer });
    this.plot = figure.querySelector(".plot");
  }

  redraw() {
    const { layer } = this, count = layer.heights.length;
    const width = Math.max(this.plot.clientWidth, 180), height = 176, tall = 46;
    const summary = `from ${readable(layer.low)} to ${readable(layer.high)}, at ${count} moments`;
    const svg = canvas(this.plot, width, height, `weights of ${layer.name}`, summary);
    svg.removeAttribute("tabindex");
    const bottom = height - 24, gap = count > 1 ? (bottom - tall - 6) / (count - 1) : 0;
    const x = scale(layer.low, layer.high, 6, width - 70);
    for (const tick of linearTicks(layer.low, layer.high, 3)) {
      draw(svg, "line", { x1: x(tick), x2: x(tick), y1: 6, y2: bottom, class: "grid-line" });
      const anchor = x(tick) < 16 ? "start" : "middle";
      draw(svg, "text", { x: x(tick), y: bottom + 17, "text-anchor": anchor }, label(tick));
    }
    layer.heights.forEach((heights, i) => {
      const base = bottom - gap * (count - 1 - i);
      const ridge = draw(svg, "path", { d: this.outline(heights, x, base, tall), stroke: "var(--panel)" });
      ridge.style.fill = `color-mix(in oklab, var(--train) ${Math.round(25 + (65 * (i + 1)) / count)}%, var(--panel))`;
      draw(ridge, "title", {}, `step ${readable(layer.steps[i])}`);
      if (i === 0 || i === count - 1) draw(svg, "text", { x: width - 64, y: base }, `step ${label(layer.steps[i])}`);
    });
  }

  outline(heights, x, base, tall) {
    const { low, high } = this.layer, wide = (high - low) / heights.length;
    const points = heights.map((h, i) => `${x(low + (i + 0.5) * wide).toFixed(1)} ${(base - (h / 100) * tall).toFixed(1)}`);
    return `M${x.from} ${base}L${points.join("L")}L${x.to} ${base}Z`;
  }
}
