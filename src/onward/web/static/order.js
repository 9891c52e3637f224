// The row at a position of a shuffle: the order of `onward train`, computed and not stored.
//
// Rows form a grid. Each round of a Feistel network shifts one coordinate by a hash of the other. If the result is outside of
// the rows, the network is applied again until it is inside.

const ROUNDS = 10;
const GOLDEN = 0x9e3779b97f4a7c15n;
const wrap = (number) => BigInt.asUintN(64, number);

export class Order {
  constructor(count, seed, epoch) {
    this.count = BigInt(count);
    this.low = BigInt(Math.max(integerRoot(count), 1));
    this.high = (this.count + this.low - 1n) / this.low;
    let key = mix(mix(wrap(BigInt(seed))) ^ wrap(BigInt(epoch)));
    this.keys = Array.from({ length: ROUNDS }, () => (key = mix(key)));
  }

  row(position) {
    let row = this.#permute(BigInt(position));
    while (row >= this.count) row = this.#permute(row);
    return Number(row);
  }

  #permute(position) {
    let high = position / this.low;
    let low = position % this.low;
    for (let round = 0; round < ROUNDS; round += 2) {
      high = (high + (hash(low ^ this.keys[round]) % this.high)) % this.high;
      low = (low + (hash(high ^ this.keys[round + 1]) % this.low)) % this.low;
    }
    return high * this.low + low;
  }
}

function integerRoot(number) {
  let root = Math.floor(Math.sqrt(number));
  while (root * root > number) root--;
  while ((root + 1) * (root + 1) <= number) root++;
  return root;
}

// Return the next number of the generator SplitMix64.
const mix = (number) => hash(wrap(number + GOLDEN));

function hash(number) {
  number = wrap((number ^ (number >> 30n)) * 0xbf58476d1ce4e5b9n);
  number = wrap((number ^ (number >> 27n)) * 0x94d049bb133111ebn);
  return number ^ (number >> 31n);
}
