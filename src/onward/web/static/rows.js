// Data: a column of numbers for each input of a batch, and batches of their rows.

import { Order } from "./order.js";
import { arrayAt, ARRAYS, convert, sizeOf } from "./tensors.js";

export class Rows {
  constructor(columns, count) {
    this.columns = columns; // {name, type, shape, values}
    this.count = count;
  }

  // Read the columns that `page.json` describes from `data.bin`. Narrow numbers are restored bit for bit.
  static read(part, bytes) {
    const columns = part.columns.map(({ name, type, shape, stored, divisor, offset }) => {
      const numbers = arrayAt(bytes, offset, stored, part.rows * sizeOf(shape));
      const values = divisor === 1 ? convert(numbers, type) : ARRAYS[type].from(numbers, (number) => number / divisor);
      return { name, type, shape, values };
    });
    return new Rows(columns, part.rows);
  }

  // Return the rows of samples, a list of {name: numbers}.
  static of(inputs, samples) {
    const columns = inputs.map(({ name, type, shape }) => {
      const size = sizeOf(shape);
      const values = new ARRAYS[type](samples.length * size);
      samples.forEach((sample, row) => values.set(convert(sample[name], type), row * size));
      return { name, type, shape, values };
    });
    return new Rows(columns, samples.length);
  }

  static join(first, second) {
    if (!first?.count) return second;
    if (!second?.count) return first;
    const columns = first.columns.map((column) => {
      const more = second.columns.find(({ name }) => name === column.name).values;
      const values = new ARRAYS[column.type](column.values.length + more.length);
      values.set(column.values);
      values.set(more, column.values.length);
      return { ...column, values };
    });
    return new Rows(columns, first.count + second.count);
  }

  // Return tensors of some rows, by the names of inputs.
  take(rows, Tensor) {
    const batch = {};
    for (const { name, type, shape, values } of this.columns) {
      const size = sizeOf(shape);
      const taken = new ARRAYS[type](rows.length * size);
      rows.forEach((row, at) => taken.set(values.subarray(row * size, (row + 1) * size), at * size));
      batch[name] = new Tensor(type, taken, [rows.length, ...shape]);
    }
    return batch;
  }
}

// The batches of an epoch, and the rows of each batch. `order` is from `page.json`.
export class Batches {
  constructor(count, order) {
    this.count = count;
    this.order = order;
    this.epoch = -1;
  }

  get perEpoch() {
    const whole = this.count / this.order.batch_size;
    return this.order.last === "drop" ? Math.floor(whole) : Math.ceil(whole);
  }

  rows(epoch, batch) {
    const { batch_size: size, last, shuffle, seed } = this.order;
    if (epoch !== this.epoch) {
      this.shuffled = new Order(this.count, seed, epoch);
      this.epoch = epoch;
    }
    const end = last === "pad" ? (batch + 1) * size : Math.min((batch + 1) * size, this.count);
    const rows = [];
    for (let position = batch * size; position < end; position++) {
      const at = position % this.count;
      rows.push(shuffle ? this.shuffled.row(at) : at);
    }
    return rows;
  }
}
