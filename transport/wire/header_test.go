package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

var update = flag.Bool("update", false, "write testdata/frames.golden anew; a change in it needs a new Version")

func TestFramesAreTheGoldenBytes(t *testing.T) {
	var got strings.Builder
	for _, s := range samples {
		fmt.Fprintf(&got, "# %s\n%s\n", s.name, hex.Dump(s.bytes()))
	}
	const path = "testdata/frames.golden"
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("the encoding differs from %s: if that is meant, raise Version and run go test -update", path)
	}
}

func TestEveryFrameTypeHasASample(t *testing.T) {
	seen := make(map[Type]bool)
	for _, s := range samples {
		seen[s.header.Type] = true
	}
	for typ := Type(1); typ < numTypes; typ++ {
		if !seen[typ] || strings.HasPrefix(typ.String(), "type(") {
			t.Errorf("no sample of %v, or no name", typ)
		}
	}
}

func TestHeadersComeBackAsTheyWere(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 1000 {
		typ := Type(1 + random.IntN(int(numTypes)-1))
		want := Header{
			Type: typ, Flags: Flags(random.Uint32()) & knownFlags, DType: units.DTypes()[random.IntN(len(units.DTypes()))],
			Codec: uint8(random.Uint32()), Epoch: random.Uint32(), Tensor: random.Uint32(),
			Part: random.Uint32N(limits.MaxParts), Rank: uint16(random.Uint32N(limits.MaxRanks)),
			Length:    uint32(random.Uint64N(uint64(typ.maxPayload()) + 1)),
			Iteration: random.Uint64(), Seq: random.Uint64(), Source: uint16(random.Uint32()), Destination: uint16(random.Uint32()),
			Divisor: uint16(random.Uint32()), Offset: random.Uint32(), Reference: random.Uint32(), Significance: random.Float32(),
		}
		if typ == TypeResult {
			want.Wait = random.Uint32()
		} else {
			want.Before = random.Uint32()
		}
		var got Header
		if err := got.Decode(want.Append(nil)); err != nil || got != want {
			t.Fatalf("seed %d: %+v came back as %+v, error %v", seed, want, got, err)
		}
	}
}

func TestNoPrefixOfAHeaderDecodes(t *testing.T) {
	whole := push.Append(nil)
	for n := range whole {
		var h Header
		if err := h.Decode(whole[:n]); !errors.Is(err, ErrHeader) {
			t.Errorf("%d bytes: error %v", n, err)
		}
	}
}

func TestHeadersOutOfBoundsAreRefusedWithTheReason(t *testing.T) {
	for want, change := range map[string]func(b []byte){
		"is the peer a Paceline node?":       func(b []byte) { copy(b, "GET / HTTP/1.1") },
		"install the same release":           func(b []byte) { b[2]++ },
		"unknown type(0)":                    func(b []byte) { b[3] = 0 },
		"unknown type(255)":                  func(b []byte) { b[3] = 255 },
		"unknown flags 0x8000 in push":       func(b []byte) { b[5] = 0x80 },
		"unknown dtype(200) in push":         func(b []byte) { b[6] = 200 },
		"partition 4294967295 in push":       func(b []byte) { copy(b[16:], "\xff\xff\xff\xff") },
		"rank 65535 in push":                 func(b []byte) { copy(b[40:], "\xff\xff") },
		"push payload of 4294967295 bytes":   func(b []byte) { copy(b[20:], "\xff\xff\xff\xff") },
		"pull payload of 1 bytes, limit 0":   func(b []byte) { b[3], b[20] = uint8(TypePull), 1 },
		"batch payload of 16777216 bytes":    func(b []byte) { b[3], b[23] = uint8(TypeBatch), 1 },
		"control payload of 33554432 bytes,": func(b []byte) { b[3], b[23] = uint8(TypeControl), 2 },
	} {
		b := push.Append(nil)
		change(b)
		var h Header
		if err := h.Decode(b); !errors.Is(err, ErrHeader) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want ErrHeader with %q", err, want)
		}
	}
}

func TestARouteUnpacksToItsEndpoints(t *testing.T) {
	for _, want := range [][2]int{{0, 0}, {3, 7}, {7, -1}, {limits.MaxRanks - 1, limits.MaxRanks - 1}} {
		var h Header
		h.Source, h.Destination = Route(want[0], want[1])
		if src, dst := h.Endpoints(); src != want[0] || dst != want[1] {
			t.Errorf("%v came back as %d, %d", want, src, dst)
		}
	}
}

func FuzzHeader(f *testing.F) {
	for _, s := range samples {
		f.Add(s.bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h Header
		if err := h.Decode(b); err != nil {
			if !errors.Is(err, ErrHeader) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		if h.Length > limits.MaxPayload || h.Rank >= limits.MaxRanks || h.Part >= limits.MaxParts {
			t.Fatalf("out of bounds: %+v", h)
		}
		// A NaN may come back with other bits on some machines; everything else is as it was.
		if again := h.Append(nil); !math.IsNaN(float64(h.Significance)) && !bytes.Equal(again, b[:HeaderSize]) {
			t.Fatalf("%x came back as %x", b[:HeaderSize], again)
		}
	})
}

func TestAWaitThatIsTooLongIsToldAsTheLongest(t *testing.T) {
	for d, want := range map[time.Duration]uint32{-time.Second: 0, 0: 0, 1500: 1, time.Hour: 3_600_000_000, 100 * time.Hour: math.MaxUint32} {
		if got := WaitOf(d); got != want {
			t.Errorf("%v travels as %d, want %d", d, got, want)
		}
	}
}
