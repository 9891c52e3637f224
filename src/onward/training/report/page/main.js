// Draws what the page holds, and draws it again when the width of the page or the smoothing changes.

const run = JSON.parse(document.getElementById("run").textContent);
const crosshair = new Crosshair(run);
const pictures = new Map();
for (const figure of document.querySelectorAll("figure")) {
  const index = Number(figure.dataset.index), plot = figure.querySelector(".plot");
  if (figure.matches(".curve")) pictures.set(plot, new Curves(figure, run.curves[index], run, crosshair));
  if (figure.matches(".norms")) pictures.set(plot, new Curves(figure, run.norms, run, crosshair));
  if (figure.matches(".map")) pictures.set(plot, new GradientMap(figure, run.map, run, crosshair));
  if (figure.matches(".ridges")) pictures.set(plot, new Ridges(figure, run.histograms[index]));
}

const slider = document.getElementById("smoothing");
const smoothing = () => (slider ? Number(slider.value) : 0);
const redraw = () => pictures.forEach((picture) => picture.redraw(smoothing()));
if (slider) slider.oninput = redraw;
redraw();

const widths = new Map([...pictures.keys()].map((plot) => [plot, plot.clientWidth]));
const watch = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const width = target.clientWidth; // none while it is folded away
    if (!width || width === widths.get(target)) continue;
    widths.set(target, width);
    pictures.get(target).redraw(smoothing());
  }
});
for (const plot of pictures.keys()) watch.observe(plot);

const printing = (begins) => {
  document.documentElement.classList.toggle("printing", begins);
  redraw();
};
window.addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  printing(true);
});
window.addEventListener("afterprint", () => printing(false));
