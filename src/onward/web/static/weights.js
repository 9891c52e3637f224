// State in the bytes of an .onnx file: only numbers are overwritten.

import { arrayAt, bytesOf, sizeOf } from "./tensors.js";

// Return the state in `training.onnx`, by name.
export function readState(bytes, state) {
  return Object.fromEntries(
    state.map(({ name, type, shape, offset }) => [name, arrayAt(bytes, offset, type, sizeOf(shape))]),
  );
}

// Return a copy of a file with other numbers. `places` are states and their offsets; `values` are arrays by name.
export function fill(bytes, places, values) {
  const copy = bytes.slice();
  for (const { state, offset } of places) copy.set(bytesOf(values[state]), offset);
  return copy;
}
