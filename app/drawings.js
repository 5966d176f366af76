// Drawings on canvases: the waveform with what was heard of it, made against heard over time, and a spectrogram.
(() => {
  const RATE = 24000;
  const PEAK = 960; // samples a peak of the player stands for, 40 ms

  // Fits a canvas to its place; gives a cleared pen, sizes in device pixels, and the colours of the page.
  const prepare = (canvas) => {
    const scale = devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    return {pen, width, height, scale, colour: (name) => style.getPropertyValue(`--${name}`)};
  };

  const bars = (canvas, player) => {
    const count = Math.max(1, Math.floor(canvas.clientWidth / 5));
    return {count, each: Math.max(1, Math.ceil(player.peaks.length / count))}; // 40 ms until the width is used up
  };

  window.mynahWave = {
    sampleAt: (canvas, player, x) => Math.floor(x / 5) * bars(canvas, player).each * PEAK,
    draw(canvas, player) {
      const {pen, height, scale, colour} = prepare(canvas);
      const {count, each} = bars(canvas, player);
      const {peaks, played, received} = player;
      const loudest = peaks.reduce((most, peak) => Math.max(most, peak), 0.2);
      for (let bar = 0; bar < count; bar++) {
        const first = bar * each;
        const peak = first < peaks.length ? Math.max(...peaks.slice(first, first + each)) : 0;
        const tall = Math.max(2 * scale, (peak / loudest) * (height - 4 * scale));
        const heard = (first + each) * PEAK <= played || (played && played === received);
        pen.fillStyle = colour(peak === 0 ? "rest" : heard ? "heard" : "made");
        pen.beginPath();
        pen.roundRect(bar * 5 * scale, (height - tall) / 2, 3 * scale, tall, 1.5 * scale);
        pen.fill();
      }
    },
  };

  window.mynahTimeline = (canvas, {timeline}) => {
    const {pen, width, height, scale, colour} = prepare(canvas);
    if (!timeline.length) return;
    const last = timeline.at(-1).at || 1;
    const most = Math.max(...timeline.map(({made}) => made));
    for (const name of ["made", "played"]) {
      pen.strokeStyle = colour(name === "made" ? "made" : "heard");
      pen.lineWidth = 2 * scale;
      pen.beginPath();
      let before = 0;
      for (const point of timeline) {
        const x = (point.at / last) * width;
        const y = (value) => height - 2 * scale - (value / most) * (height - 4 * scale);
        if (name === "made") pen.lineTo(x, y(before)); // chunks arrive at once: steps
        pen.lineTo(x, y(point[name]));
        before = point[name];
      }
      pen.stroke();
    }
  };

  const SIZE = 512;
  const HANN = Float32Array.from({length: SIZE}, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / SIZE));

  // Radix-2 FFT in place of re + i im.
  const fft = (re, im) => {
    const n = re.length;
    for (let i = 1, j = 0; i < n; i++) {
      let bit = n >> 1;
      for (; j & bit; bit >>= 1) j ^= bit;
      j ^= bit;
      if (i < j) [re[i], re[j]] = [re[j], re[i]];
    }
    for (let half = 1; half < n; half *= 2) {
      for (let k = 0; k < half; k++) {
        const [cos, sin] = [Math.cos((Math.PI * k) / half), -Math.sin((Math.PI * k) / half)];
        for (let i = k; i < n; i += 2 * half) {
          const j = i + half;
          const [r, m] = [re[j] * cos - im[j] * sin, re[j] * sin + im[j] * cos];
          [re[j], im[j]] = [re[i] - r, im[i] - m];
          [re[i], im[i]] = [re[i] + r, im[i] + m];
        }
      }
    }
  };

  // Power in dB of the bins 0 to SIZE/2 of the window that begins at a sample; 0 dB is a full-scale sine.
  const spectrum = (samples, first) => {
    const re = HANN.map((weight, i) => weight * (samples[first + i] ?? 0));
    const im = new Float32Array(SIZE);
    fft(re, im);
    const decibels = (bin) => 20 * Math.log10(Math.hypot(re[bin], im[bin]) / (SIZE / 4) + 1e-6);
    return Array.from({length: SIZE / 2}, (_, bin) => decibels(bin));
  };
  window.mynahSpectrum = spectrum;

  window.mynahSpectrogram = (canvas, {sound, received}) => {
    const {pen, width, height} = prepare(canvas);
    if (!received || !width) return;
    const samples = new Float32Array(received);
    let at = 0;
    for (const part of sound) { samples.set(part, at); at += part.length; }
    const picture = pen.createImageData(width, height);
    for (let x = 0; x < width; x++) {
      const powers = spectrum(samples, Math.floor((x / width) * Math.max(1, received - SIZE)));
      for (let y = 0; y < height; y++) {
        const power = powers[Math.floor(((height - 1 - y) / height) * (SIZE / 2))];
        const glow = Math.max(0, Math.min(1, (power + 90) / 80));
        // black over amber to white
        picture.data.set([255 * Math.min(1, 1.7 * glow), 255 * glow ** 1.4, 255 * glow ** 4, 255], 4 * (y * width + x));
      }
    }
    pen.putImageData(picture, 0, 0);
  };
})();
