// A file that the browser calls a video, dropped on the place for a recording: only its sound is taken.
addEventListener("drop", (event) => {
  const zone = event.target.closest?.("#reference, #source");
  const file = event.dataTransfer?.files[0];
  const video = file && (file.type.startsWith("video/") || /\.(webm|mp4|m4v|mov|mkv|avi)$/i.test(file.name));
  if (!zone || !video) return;
  event.preventDefault();
  event.stopPropagation();
  const input = document.querySelector(`#${zone.id}-video-box input[type=file]`);
  const files = new DataTransfer();
  files.items.add(file);
  input.files = files.files;
  input.dispatchEvent(new Event("change", {bubbles: true}));
}, true);
