"use strict";
// The data of the page: columns by name, as proto/sched_trace.py and page.py describe them.

async function unpack() {
  const text = document.getElementById("data").textContent;
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const columns = {};
  let at = 4 + length;
  for (const [name, [kind, count]] of Object.entries(about.columns)) {
    const size = (kind === "d" ? 8 : 4) * count;
    const part = bytes.slice(at, at + size);
    columns[name] = kind === "d" ? new Float64Array(part) : new Int32Array(part);
    at += size;
  }
  return { about, columns, numSteps: columns.step.length, numRows: columns.seq_id.length };
}

// First index whose value is not below `value`, in a column that ascends.
function lowerBound(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// The first segment of each row; they are sorted by row. One more entry than rows.
function firstSegments(rows, count) {
  const first = new Int32Array(count + 1);
  for (const row of rows) first[row + 1]++;
  for (let row = 0; row < count; row++) first[row + 1] += first[row];
  return first;
}

function duration(micros) {
  const size = Math.abs(micros);
  if (size < 1e3) return `${Math.round(micros)} µs`;
  if (size < 1e6) return `${(micros / 1e3).toPrecision(3)} ms`;
  if (size < 6e7) return `${(micros / 1e6).toPrecision(3)} s`;
  const minutes = Math.floor(micros / 6e7);
  return `${minutes} min ${((micros - minutes * 6e7) / 1e6).toFixed(0)} s`;
}

const count = (number) => number.toLocaleString("en");
const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
