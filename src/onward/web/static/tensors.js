// Types of tensors, and their typed arrays in JavaScript.

export const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: Uint16Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};

export const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

export const bytesPer = (type) => ARRAYS[type].BYTES_PER_ELEMENT;

// Return a copy of the numbers at an offset in bytes, as a typed array.
export function arrayAt(bytes, offset, type, count) {
  const length = count * bytesPer(type);
  return new ARRAYS[type](bytes.slice(offset, offset + length).buffer);
}

export const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

// Convert numbers or bigints to the typed array of a type: bigints for 64-bit integers, else numbers.
export function convert(numbers, type) {
  const Target = ARRAYS[type];
  if (numbers instanceof Target) return numbers;
  if (type.endsWith("int64"))
    return Target.from(numbers, (number) => BigInt(typeof number === "bigint" ? number : Math.round(number)));
  return Target.from(numbers, type.startsWith("float") ? Number : (number) => Math.round(Number(number)));
}
