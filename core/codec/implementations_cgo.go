//go:build cgo

package codec

// #cgo CFLAGS: -std=c11 -O3 -Wall -Wextra
// #cgo LDFLAGS: -lm
// #cgo noescape codec_encode
// #cgo nocallback codec_encode
// #cgo noescape codec_decode
// #cgo nocallback codec_decode
// #cgo noescape codec_scan
// #cgo nocallback codec_scan
// #cgo noescape codec_feed
// #cgo nocallback codec_feed
// #cgo noescape codec_momentum
// #cgo nocallback codec_momentum
// #include "codec.h"
import "C"

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// kernels is the C kernels for one instruction set.
type kernels struct {
	level C.int
	name  string
}

// implementations lists the implementations that this machine can run, the fastest last.
func implementations() []implementation {
	all := []implementation{reference{}, kernels{C.CODEC_LEVEL_PLAIN, "plain"}}
	if cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2 && cpu.X86.HasPOPCNT && C.codec_has_f16c() != 0 {
		all = append(all, kernels{C.CODEC_LEVEL_AVX2, "avx2"})
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL {
			all = append(all, kernels{C.CODEC_LEVEL_AVX512, "avx512"})
		}
	}
	return all
}

func (e kernels) String() string { return e.name }

func (e kernels) encode(g *grid, dst, src, residual []byte, k keys) int {
	return int(C.codec_encode(e.level, gridOf(g), (*C.uint8_t)(pointer(dst)), pointer(src), pointer(residual),
		count(src), C.struct_codec_keys{k0: C.uint32_t(k.k0), k1: C.uint32_t(k.k1)}))
}

func (e kernels) decode(g *grid, dst, message []byte, add bool) fault {
	switch C.codec_decode(e.level, gridOf(g), pointer(dst), (*C.uint8_t)(pointer(message)), C.size_t(len(message)), count(dst), flag(add)) {
	case C.CODEC_BAD_LENGTH:
		return badLength
	case C.CODEC_BAD_CODE:
		return badCode
	}
	return sound
}

func (e kernels) scan(x, src []byte, from int, threshold uint32, c *candidates) int {
	found := C.size_t(c.n)
	at := C.codec_scan(e.level, pointer(x), pointer(src), C.size_t(from), count(x), C.uint32_t(threshold),
		(*C.uint32_t)(unsafe.SliceData(c.index)), (*C.uint32_t)(unsafe.SliceData(c.key)), C.size_t(len(c.index)), &found)
	c.n = int(found)
	return int(at)
}

func (e kernels) feed(x, src []byte) uint32 {
	return uint32(C.codec_feed(e.level, pointer(x), pointer(src), count(x)))
}

func (e kernels) momentum(v, u, src []byte, m float32) {
	C.codec_momentum(e.level, pointer(v), pointer(u), pointer(src), count(v), C.float(m))
}

// gridOf gives C's numbers, which have the same order.
func gridOf(g *grid) C.struct_codec_grid {
	return C.struct_codec_grid{
		kind: C.int(g.kind), norm: C.int(g.norm), levels: C.uint32_t(g.levels), bits: C.uint32_t(g.bits),
		block: C.uint32_t(g.block), elias: flag(g.elias), clip: C.double(g.clip),
	}
}

// pointer is NULL for an absent residual.
func pointer(b []byte) unsafe.Pointer {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(b))
}

func count(tensor []byte) C.size_t { return C.size_t(len(tensor) / 4) }

func flag(is bool) C.int {
	if is {
		return 1
	}
	return 0
}
