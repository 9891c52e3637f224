// Tables as text: one row per line, as spreadsheets export them.

export class TableError extends Error {}

// Return the cells of each line. Quoted cells may contain separators, quotes ("") and newlines.
export function parse(text) {
  const separator = chooseSeparator(text);
  const lines = [];
  let line = [];
  let cell = "";
  let quoted = false;
  const end = () => {
    line.push(cell.trim());
    cell = "";
  };
  for (let at = text.charCodeAt(0) === 0xfeff ? 1 : 0; at < text.length; at++) {
    const character = text[at];
    if (quoted) {
      if (character !== '"') cell += character;
      else if (text[at + 1] === '"') cell += text[at++];
      else quoted = false;
    } else if (character === '"' && cell.trim() === "") {
      quoted = true;
      cell = "";
    } else if (character === separator) end();
    else if (character === "\n") {
      end();
      lines.push(line);
      line = [];
    } else if (character !== "\r") cell += character;
  }
  end();
  lines.push(line);
  return lines.filter((cells) => cells.some((text) => text !== ""));
}

function chooseSeparator(text) {
  const first = text.split("\n", 1)[0];
  const counts = [",", ";", "\t"].map((separator) => first.split(separator).length);
  return [",", ";", "\t"][counts.indexOf(Math.max(...counts))];
}

// Return the samples of a table: {input: numbers}. The target is the column with its name, else the last one.
//
// `inputs` are the inputs of a batch, one of them a target. `labels` (null unless the target is a class) names this input and
// its classes.
export function samplesOf(text, inputs, labels) {
  const lines = parse(text);
  if (!lines.length) throw new TableError("The table is empty.");
  const target = inputs.find(({ is_target }) => is_target);
  const others = inputs.filter((input) => input !== target);
  const sizes = new Map(inputs.map((input) => [input, input.shape.reduce((a, b) => a * b, 1)]));
  const width = [...sizes.values()].reduce((a, b) => a + b, 0);
  const words = lines[0].filter((cell) => cell !== "" && !isNumber(cell)).length;
  const header = words > sizes.get(target) ? lines.shift() : null; // only classes can be words
  const first = header ? targetColumn(header, target.name, sizes.get(target)) : width - sizes.get(target);
  return lines.map((cells, number) => {
    const where = `Line ${number + 1 + (header ? 1 : 0)}`;
    if (cells.length !== width) {
      throw new TableError(`${where} has ${cells.length} columns; a row needs ${width}, including the target.`);
    }
    const answers = cells.slice(first, first + sizes.get(target));
    const rest = [...cells.slice(0, first), ...cells.slice(first + sizes.get(target))];
    const sample = {
      [target.name]: answers.map((cell) => (labels ? classOf(cell, labels, where) : toNumber(cell, where))),
    };
    for (const input of others) {
      sample[input.name] = rest.splice(0, sizes.get(input)).map((cell) => toNumber(cell, where));
    }
    return sample;
  });
}

function targetColumn(header, name, size) {
  const words = [name, "label", "labels", "class", "target", "y"].map((word) => word.toLowerCase());
  const index = header.findIndex((cell) => words.includes(cell.toLowerCase()));
  return index >= 0 && size === 1 ? index : header.length - size;
}

const isNumber = (cell) => cell !== "" && Number.isFinite(Number(cell));

function toNumber(cell, where) {
  if (!isNumber(cell)) throw new TableError(`${where}: “${cell}” is not a number.`);
  return Number(cell);
}

function classOf(cell, labels, where) {
  const index = labels.names.indexOf(cell);
  if (index >= 0) return index;
  const number = Number(cell);
  if (Number.isInteger(number) && number >= 0 && number < labels.count && cell !== "") return number;
  throw new TableError(`${where}: “${cell}” is not a class (${labels.names.slice(0, 12).join(", ")}).`);
}
