// A drawing pad for touch, pen, mouse and arrow keys. It also shows images and the camera.

import { fromImage, fromInk, paint } from "./pictures.js";
import { find, say } from "./elements.js";

const SIZE = 280; // pixels of the canvas, at any size on the screen
const PEN = 26; // width of strokes in pixels
const INK = "#4277ec"; // visible in light and dark mode
const FRAMES = 150; // milliseconds between camera frames

export class Pad {
  // `onChange(values)` is called with the input of the model, or null if the pad is empty.
  constructor(picture, onChange) {
    Object.assign(this, { picture, onChange });
    this.canvas = find("pad");
    this.video = find("camera-view");
    this.canvas.width = Math.round(SIZE * Math.min(picture.width / picture.height, 1));
    this.canvas.height = Math.round(SIZE * Math.min(picture.height / picture.width, 1));
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.pen = { x: this.canvas.width / 2, y: this.canvas.height / 2, down: false };
    this.canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (this.from = null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    find("clear").addEventListener("click", () => this.clear());
    find("camera").addEventListener("click", () => (this.stream ? this.stopCamera() : this.#startCamera()));
    find("camera").hidden = !navigator.mediaDevices?.getUserMedia;
    this.clear();
  }

  clear() {
    this.stopCamera();
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.#settle(null);
    find("pad-hint").hidden = false;
  }

  // Show an image and use it as input.
  show(image) {
    this.clear();
    this.#take(fromImage(image, this.picture));
  }

  #take(values) {
    const small = document.createElement("canvas");
    paint(small, values, this.picture);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    this.isDrawing = false;
    find("pad-hint").hidden = true;
    this.#settle(values);
  }

  #settle(values) {
    this.values = values;
    this.onChange(values);
  }

  // ---- drawing ----

  #begin(event) {
    if (event.button) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.from = this.#at(event);
    this.#stroke(this.from, this.from);
  }

  #move(event) {
    if (!this.from) return;
    for (const move of event.getCoalescedEvents?.() ?? [event]) {
      const to = this.#at(move);
      this.#stroke(this.from, to);
      this.from = to;
    }
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === " ") {
      this.pen.down = !this.pen.down;
      say(this.pen.down ? "The pen is down: arrow keys draw." : "The pen is up: arrow keys move it.");
    } else if (event.key === "Escape") this.clear();
    else if (moves[event.key]) {
      const [x, y] = moves[event.key];
      const to = {
        x: Math.min(Math.max(this.pen.x + (x * PEN) / 2, 0), this.canvas.width),
        y: Math.min(Math.max(this.pen.y + (y * PEN) / 2, 0), this.canvas.height),
      };
      if (this.pen.down) this.#stroke(this.pen, to);
      Object.assign(this.pen, to);
    } else return;
    event.preventDefault();
  }

  #stroke(from, to) {
    if (!this.isDrawing) this.clear();
    this.isDrawing = true;
    find("pad-hint").hidden = true;
    const { context } = this;
    Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: INK });
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y);
    context.stroke();
    const { data, width, height } = context.getImageData(0, 0, this.canvas.width, this.canvas.height);
    const ink = new Float32Array(width * height);
    for (let at = 0; at < ink.length; at++) ink[at] = data[at * 4 + 3] / 255;
    this.#settle(fromInk(ink, width, height, this.picture));
  }

  // ---- the camera ----

  async #startCamera() {
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      say(
        error.name === "NotAllowedError"
          ? "The camera is blocked. Allow it in the browser settings for this page."
          : "No camera is available.",
      );
      return;
    }
    this.video.srcObject = this.stream;
    await this.video.play();
    find("camera").setAttribute("aria-pressed", "true");
    this.timer = setInterval(() => {
      if (this.video.videoWidth) this.#take(fromImage(this.video, this.picture));
    }, FRAMES);
  }

  stopCamera() {
    this.isDrawing = false;
    clearInterval(this.timer);
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    find("camera").setAttribute("aria-pressed", "false");
  }
}
