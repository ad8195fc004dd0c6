// Images that the next message gets: by a button, the camera of a phone, drop or paste. Large ones are made
// smaller before they are kept, since the model reads no more of them. An image: { id, url }, a data URI.
import { newId } from "./conversation.js";
import { announce, button, byId, make } from "./dom.js";

const MAX_SIDE = 1536; // pixels
const MAX_KEPT_BYTES = 300_000; // a larger file is encoded again
const KEPT = ["image/jpeg", "image/png", "image/webp", "image/gif"]; // what every server reads
const QUALITY = 0.9;

/** The row of images in the composer. onChange(): called after each change; report(words): says what failed. */
export class Attachments {
  constructor(onChange, report) {
    this.onChange = onChange;
    this.report = report;
    this.images = [];
    this.isOffered = false;
    for (const [name, input] of [["attach", "attach-file"], ["camera", "camera-file"]]) {
      byId(name).addEventListener("click", () => byId(input).click());
      byId(input).addEventListener("change", () => {
        this.#add(byId(input).files);
        byId(input).value = "";
      });
    }
    byId("message").addEventListener("paste", (event) => {
      if (this.#take(event.clipboardData.files)) event.preventDefault();
    });
    const panel = byId("panel-chat");
    const mark = (event, isOver) => {
      if (!this.isOffered || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      panel.classList.toggle("dropping", isOver);
    };
    panel.addEventListener("dragover", (event) => mark(event, true));
    panel.addEventListener("dragleave", (event) => mark(event, panel.contains(event.relatedTarget)));
    panel.addEventListener("drop", (event) => {
      mark(event, false);
      this.#take(event.dataTransfer.files);
    });
  }

  /** Shows the buttons, if the model reads images. */
  offer(takesImages) {
    this.isOffered = takesImages;
    byId("attach").hidden = byId("camera").hidden = !takesImages;
    if (!takesImages) this.clear();
  }

  clear() {
    this.#change([]);
  }

  #take(files) {
    const isWanted = this.isOffered && files.length > 0;
    if (isWanted) this.#add(files);
    return isWanted;
  }

  async #add(files) {
    for (const file of [...files]) { // the browser empties the list meanwhile
      try {
        const url = await dataUriOf(file);
        if (!this.isOffered) return;
        this.#change([...this.images, { id: newId(), url }]);
        announce("Image added.");
      } catch {
        this.report(`${file.name} is not an image that this browser can read.`);
      }
    }
  }

  #change(images) {
    this.images = images;
    const thumbs = images.map(({ id, url }, at) => {
      const remove = button("×", () => {
        this.#change(this.images.filter((each) => each.id !== id));
        byId("message").focus();
      });
      remove.ariaLabel = `Remove image ${at + 1}`;
      return make("span", { class: "thumb" }, make("img", { src: url, alt: `Image ${at + 1}` }), remove);
    });
    byId("attached").replaceChildren(...thumbs);
    byId("attached").hidden = images.length === 0;
    this.onChange();
  }
}

/** Returns the images of a turn as elements. */
export const picturesOf = (turn) =>
  (turn.images ?? []).map(({ url }, at) => make("img", { class: "picture", src: url, alt: `Image ${at + 1}` }));

/** Returns an image file as a data URI, smaller if it is large; throws for a file that is no image. */
async function dataUriOf(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  if (scale === 1 && file.size <= MAX_KEPT_BYTES && KEPT.includes(file.type)) return readAsUri(file);
  const size = { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) };
  const canvas = make("canvas", size);
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG knows no transparency
  context.fillRect(0, 0, size.width, size.height);
  context.drawImage(bitmap, 0, 0, size.width, size.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

const readAsUri = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
