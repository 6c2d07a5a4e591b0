"""Registers and stack of the kernels of a cubin, as its ELF file says."""

import struct

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info: pairs of a symbol and a number


def read_resources(cubin):
    """Return the registers of each kernel, and the bytes of its stack, which hold spilled registers."""
    (sections,), (size, count, names) = (
        struct.unpack_from("<Q", cubin, 40),
        struct.unpack_from("<3H", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + size * number) for number in range(count)]

    def text(table, at):
        start = table[4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    found = {}
    by_name = {text(headers[names], header[0]): header for header in headers}
    start, length = by_name[".nv.info"][4:6]
    at = start
    while at < start + length:
        form, kind, value = struct.unpack_from("<BBH", cubin, at)
        if kind in (_REGISTERS, _FRAME):
            symbol, number = struct.unpack_from("<II", cubin, at + 4)
            found.setdefault(symbol, {})[kind] = number
        at += 4 + (value if form == 4 else 0)
    symbols = by_name[".symtab"]
    strings = headers[symbols[6]]
    made = {
        text(strings, struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0]): numbers
        for symbol, numbers in found.items()
    }
    return {name: (numbers.get(_REGISTERS, 0), numbers.get(_FRAME, 0)) for name, numbers in made.items()}
