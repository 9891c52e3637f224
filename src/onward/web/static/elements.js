// Helpers for elements and texts of the page.

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else if (value !== undefined) element[name] = value;
  }
  element.append(...children);
  return element;
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function download(bytes, name, type = "application/octet-stream") {
  const link = make("a", { href: URL.createObjectURL(new Blob([bytes], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Show a notice, which screen readers announce.
export function say(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}
