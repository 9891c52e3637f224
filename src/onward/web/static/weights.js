// State, into and out of the bytes of an .onnx file: only numbers are written over, and the file stays as it is.

import { arrayAt, bytesOf, sizeOf } from "./tensors.js";

// The state that is in `training.onnx`, by name.
export function readState(bytes, state) {
  return Object.fromEntries(
    state.map(({ name, type, shape, offset }) => [name, arrayAt(bytes, offset, type, sizeOf(shape))]),
  );
}

// A copy of a file with other numbers in it. `places` say which state goes where; `values` are arrays by name.
export function fill(bytes, places, values) {
  const copy = bytes.slice();
  for (const { state, offset } of places) copy.set(bytesOf(values[state]), offset);
  return copy;
}
