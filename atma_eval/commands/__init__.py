"""Commands that read results. One module each: parse, call one function, render; importing them is cheap."""
