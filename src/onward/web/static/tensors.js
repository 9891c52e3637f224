// Types of tensors, and the arrays of JavaScript that hold their numbers.

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

// Numbers that stand at an offset in bytes, as an array of their own.
export function arrayAt(bytes, offset, type, count) {
  const length = count * bytesPer(type);
  return new ARRAYS[type](bytes.slice(offset, offset + length).buffer);
}

export const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

// An array of a type, of numbers or of bigints: 64 bits are bigints, and nothing else is.
export function convert(numbers, type) {
  const Target = ARRAYS[type];
  if (numbers instanceof Target) return numbers;
  if (type.endsWith("int64"))
    return Target.from(numbers, (one) => BigInt(typeof one === "bigint" ? one : Math.round(one)));
  return Target.from(numbers, type.startsWith("float") ? Number : (one) => Math.round(Number(one)));
}
