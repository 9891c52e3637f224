// A non-cryptographic hash of bytes. (Browsers have SHA-256 in crypto.subtle, but only on
// pages with HTTPS, which pages in a local network often lack.)

const SEEDS = [0x811c9dc5, 0x1b873593, 0xcc9e2d51, 0x9e3779b9];

export function digest(...pieces) {
  const lanes = [...SEEDS];
  for (const bytes of pieces) {
    for (let at = 0; at < bytes.length; at++) {
      const lane = at & 3;
      lanes[lane] = Math.imul(lanes[lane] ^ bytes[at], 0x01000193);
      lanes[lane] ^= lanes[lane] >>> 15;
    }
    lanes.forEach(
      (_, lane) => (lanes[lane] = Math.imul(lanes[lane] ^ lanes[(lane + 1) & 3] ^ bytes.length, 0x85ebca6b)),
    );
  }
  return lanes.map((lane) => (lane >>> 0).toString(16).padStart(8, "0")).join("");
}
