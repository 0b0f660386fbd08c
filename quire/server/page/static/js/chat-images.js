// Images of messages: taken from files, made small enough to be kept, and shown.

import { html } from "../vendor/preact.js";
import { useLive } from "./live.js";

const KEPT = /^data:image\/(png|jpeg|webp|gif);base64,[\w+/=]+$/;
const READ = /^image\/(png|jpeg|webp|gif)$/; // as the server reads them
const SIDE = 1280; // pixels
const BYTES = 400_000; // a browser keeps some five million in all

/** True for what `imageOf` returns: nothing else is shown or sent. */
export const isImage = (url) => KEPT.test(url);

const asUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    Object.assign(reader, { onload: () => resolve(reader.result), onerror: reject });
    reader.readAsDataURL(file);
  });

/** Return a file as a data: URL, in fewer pixels if it is large. Throws an Error if it is no image. */
export async function imageOf(file) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot read it as an image`);
  }
  const scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= BYTES && READ.test(file.type)) return asUrl(file);
  const canvas = document.createElement("canvas");
  const size = [picture.width, picture.height].map((one) => Math.max(1, Math.round(scale * one)));
  [canvas.width, canvas.height] = size;
  const paper = canvas.getContext("2d");
  paper.fillStyle = "white"; // where a picture is transparent
  paper.fillRect(0, 0, ...size);
  paper.drawImage(picture, 0, 0, ...size);
  return canvas.toDataURL("image/jpeg", 0.92);
}

/** The images of a message; with `onRemove` each can be taken away. */
export const Images = ({ images, onRemove }) =>
  images.length > 0 &&
  html`<ul class="images">${images.map(
    (url, at) =>
      html`<li key=${at}><img src=${url} alt=${`Image ${at + 1}`} />${
        onRemove &&
        html`<button type="button" class="quiet" aria-label=${`Remove image ${at + 1}`}
          onClick=${() => onRemove(at)}>✕</button>`
      }</li>`,
  )}</ul>`;

/** A choice of files, where the model sees. */
export function AddImages({ onFiles }) {
  const { facts } = useLive();
  const take = ({ target }) => {
    onFiles([...target.files]);
    target.value = ""; // the same file may be chosen again
  };
  return (
    facts?.model?.sees &&
    html`<label class="file" title="or paste one, or drop it here">Image
      <input type="file" class="visually-hidden" accept="image/*" multiple onChange=${take} /></label>`
  );
}
