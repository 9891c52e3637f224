// Scales, ticks and the drawing of SVG: what all charts share.

const NS = "http://www.w3.org/2000/svg";

/** An SVG element with attributes, inside a parent. Texts are set as texts, so that nothing in them is markup. */
function draw(parent, name, attributes = {}, text = null) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

/** An HTML element, likewise. */
function make(parent, name, className = "", text = null) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

/** A number as one reads it: 0.0213, 12,400, 3.1e-6. */
function readable(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

/** A label of an axis; shorter than a readout: 20k, 1.5M. */
function label(value) {
  const size = Math.abs(value);
  if (size >= 1e6 && size < 1e9) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4 && size < 1e6) return `${Number((value / 1e3).toPrecision(4))}k`;
  return readable(value);
}

/** Round numbers between two, about so many: steps of 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, about) {
  const rough = (high - low) / Math.max(about, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

/** Powers of ten between two numbers, with 2 and 5 times them where there are few. */
function logTicks(low, high, about) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / about));
  const decades = Math.log10(high / low);
  const factors = decades <= 1 ? [1, 2, 3, 5, 7] : decades <= 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) {
      const value = Number((factor * 10 ** power).toPrecision(12));
      if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push(value);
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(low, high, about).filter((value) => value > 0);
}

/** A function from values to pixels, with the values that it spans. */
function scale(low, high, from, to, log = false) {
  const bend = log ? Math.log10 : (value) => value;
  const start = bend(low), width = bend(high) - start || 1;
  const map = (value) => from + ((bend(value) - start) / width) * (to - from);
  map.invert = (pixel) => {
    const value = start + ((pixel - from) / (to - from)) * width;
    return log ? 10 ** value : value;
  };
  return Object.assign(map, { low, high, from, to });
}

/** The index of the element of a sorted list that is nearest to a value. */
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}

/** An empty chart: an SVG that says what it is to those who do not see it. */
function canvas(plot, width, height, title, summary) {
  plot.replaceChildren();
  const svg = draw(plot, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0 });
  svg.setAttribute("aria-label", summary ? `${title}. ${summary}` : title);
  return svg;
}

/** The axis of steps, below a chart. */
function stepAxis(svg, x, bottom) {
  const fit = Math.max(2, Math.floor((x.to - x.from) / 90));
  for (const tick of linearTicks(x.low, x.high, fit)) {
    if (!Number.isInteger(tick)) continue;
    draw(svg, "text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, label(tick));
    draw(svg, "line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4, class: "axis-line" });
  }
}
