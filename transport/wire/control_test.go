package wire

import (
	"bytes"
	"encoding/json"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

func TestJSONPayloadsComeBackAsTheyWere(t *testing.T) {
	for _, s := range samples {
		if !s.json() {
			continue
		}
		frame := s.bytes()
		got := reflect.New(reflect.TypeOf(s.payload))
		if err := DecodeJSON(s.header.Type, frame[HeaderSize:], got.Interface()); err != nil || !reflect.DeepEqual(got.Elem().Interface(), s.payload) {
			t.Errorf("%s came back as %+v, error %v", s.name, got.Elem(), err)
		}
		for n := range frame[HeaderSize:] {
			if err := DecodeJSON(s.header.Type, frame[HeaderSize:HeaderSize+n], got.Interface()); err == nil ||
				!strings.Contains(err.Error(), "bad "+s.header.Type.String()+" payload") {
				t.Errorf("%d bytes of %s: error %v", n, s.name, err)
			}
		}
	}
}

func TestJSONHasOneSpelling(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			walk(typ.Elem())
		case reflect.Struct:
			if seen[typ] {
				return
			}
			seen[typ] = true
			for i := range typ.NumField() {
				field := typ.Field(i)
				if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); !snakeCase.MatchString(name) {
					t.Errorf("%v.%s is spelled %q", typ, field.Name, name)
				}
				walk(field.Type)
			}
		}
	}
	for _, s := range samples {
		if s.json() {
			walk(reflect.TypeOf(s.payload))
		}
	}
	if len(seen) < 15 {
		t.Errorf("%d structures are looked at", len(seen))
	}
}

var snakeCase = regexp.MustCompile(`^[a-z]+(_[a-z0-9]+)*$`)

func TestJSONFramesThatNoPeerWouldTakeAreNotMade(t *testing.T) {
	long := Control{Error: strings.Repeat("x", limits.MaxControl)}
	b := &bytebufferpool.ByteBuffer{B: []byte("before")}
	if err := AppendJSON(b, Header{Type: TypeControl}, long); err == nil || !strings.Contains(err.Error(), "control payload of") {
		t.Errorf("too long: error %v", err)
	}
	if err := AppendJSON(b, Header{Type: TypePull}, Hello{}); err == nil || !strings.Contains(err.Error(), "pull payload of") {
		t.Errorf("JSON in a frame without payload: error %v", err)
	}
	if err := AppendJSON(b, Header{Type: TypeHello}, func() {}); err == nil || !strings.Contains(err.Error(), "hello frame") {
		t.Errorf("no JSON: error %v", err)
	}
	if string(b.B) != "before" {
		t.Errorf("%d bytes of what was refused stay", len(b.B))
	}
}

func TestSignaturesReadAsPeopleWouldWriteThem(t *testing.T) {
	for want, change := range map[string]func(*Tensor){
		"allreduce Average float32 [10, 4] prescale 1 postscale 0.5": func(*Tensor) {},
		"allreduce Sum float64 []":                                   func(t *Tensor) { t.Op, t.DType, t.Shape, t.Postscale = units.Sum, units.Float64, nil, 1 },
		"reducescatter Max int8 [3]": func(t *Tensor) {
			t.Kind, t.Op, t.DType, t.Shape, t.Postscale = units.Reducescatter, units.Max, units.Int8, []int64{3}, 1
		},
		"allgather bool [*, 4]":               func(t *Tensor) { t.Kind, t.DType, t.Shape, t.Postscale = units.Allgather, units.Bool, []int64{4}, 1 },
		"alltoall bfloat16 [*]":               func(t *Tensor) { t.Kind, t.DType, t.Shape, t.Postscale = units.Alltoall, units.BFloat16, nil, 1 },
		"broadcast int64 [10, 4] from rank 2": func(t *Tensor) { t.Kind, t.DType, t.Root, t.Postscale = units.Broadcast, units.Int64, 2, 1 },
	} {
		got := tensor
		if change(&got); got.Signature() != want {
			t.Errorf("signature %q, want %q", got.Signature(), want)
		}
	}
}

func TestTensorsOutOfBoundsAreRefusedWithTheReason(t *testing.T) {
	if err := tensor.Check(); err != nil {
		t.Errorf("a good tensor: %v", err)
	}
	for want, change := range map[string]func(*Tensor){
		"a name of 0 bytes":                   func(t *Tensor) { t.Name = "" },
		"a name of 4097 bytes":                func(t *Tensor) { t.Name = strings.Repeat("x", limits.MaxName+1) },
		"which has a NUL at byte 1":           func(t *Tensor) { t.Name = "x\x00y" },
		"which is not UTF-8":                  func(t *Tensor) { t.Name = "x\xff" },
		"kind(99) Average float32":            func(t *Tensor) { t.Kind = 99 },
		"allreduce op(99) float32":            func(t *Tensor) { t.Op = 99 },
		"allreduce Average dtype(99)":         func(t *Tensor) { t.DType = 99 },
		"65 dimensions, limit 64":             func(t *Tensor) { t.Shape = make([]int64, limits.MaxDims+1) },
		"negative dimension":                  func(t *Tensor) { t.Shape = []int64{4, -1} },
		"root -1 is no rank":                  func(t *Tensor) { t.Root = -1 },
		"0 partitions":                        func(t *Tensor) { t.Parts = nil },
		"partition of 1073741825 bytes":       func(t *Tensor) { t.Parts = []uint32{limits.MaxPayload + 1} },
		"1100585369600 bytes":                 func(t *Tensor) { t.Parts = slices.Repeat([]uint32{limits.MaxPayload}, 1025) },
		"0 ranks":                             func(t *Tensor) { t.Ranks = nil },
		"rank 0 at place 1 of its ranks":      func(t *Tensor) { t.Ranks = []int{0, 0} },
		"rank -1 at place 0 of its ranks":     func(t *Tensor) { t.Ranks = []int{-1} },
		"rank 16384 at place 0 of its ranks:": func(t *Tensor) { t.Ranks = []int{limits.MaxRanks} },
	} {
		bad := tensor
		change(&bad)
		if err := bad.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		} else if bad.Name == tensor.Name && !strings.Contains(err.Error(), tensor.Name) {
			t.Errorf("error %v does not name the tensor", err)
		}
	}
}

// fuzzJSON has a payload decoded, and what was understood encoded and decoded again: it must stay the same.
func fuzzJSON[T any](f *testing.F, typ Type, also func(t *testing.T, v *T)) {
	for _, s := range samples {
		if s.header.Type == typ {
			f.Add(s.bytes()[HeaderSize:])
		}
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var v, again T
		if DecodeJSON(typ, payload, &v) != nil {
			return
		}
		also(t, &v)
		first, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if err := DecodeJSON(typ, first, &again); err != nil {
			t.Fatal(err)
		}
		if second, err := json.Marshal(again); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%s came back as %s, error %v", first, second, err)
		}
	})
}

func FuzzHello(f *testing.F)   { fuzzJSON(f, TypeHello, func(*testing.T, *Hello) {}) }
func FuzzFailure(f *testing.F) { fuzzJSON(f, TypeFail, func(*testing.T, *Failure) {}) }
func FuzzStall(f *testing.F)   { fuzzJSON(f, TypeStall, func(*testing.T, *Stall) {}) }
func FuzzLost(f *testing.F)    { fuzzJSON(f, TypeLost, func(*testing.T, *Lost) {}) }
func FuzzControl(f *testing.F) { fuzzJSON(f, TypeControl, func(*testing.T, *Control) {}) }

func FuzzTensor(f *testing.F) {
	fuzzJSON(f, TypeAnnounce, func(t *testing.T, v *Tensor) {
		if err := v.Check(); err != nil {
			return
		}
		if len(v.Name) > limits.MaxName || len(v.Parts) > limits.MaxParts || len(v.Ranks) > limits.MaxRanks || v.Signature() == "" {
			t.Fatalf("out of bounds: %+v", v)
		}
	})
}

func TestTextsForPeopleAreCut(t *testing.T) {
	long := strings.Repeat("w", 3*limits.MaxText)
	node := Node{Role: RoleWorker, Host: long, Version: long}
	roster := Roster{Workers: []Node{node}, Servers: []Node{node}}
	sent := Control{
		Lost: &Lost{Role: RoleWorker, Why: long}, Roster: &roster,
		Register: &Register{Node: node, Known: &Known{Roster: roster}},
	}
	data, err := json.Marshal(&sent)
	if err != nil {
		t.Fatal(err)
	}
	var got Control
	if err := DecodeJSON(TypeControl, data, &got); err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{
		"why": got.Lost.Why, "host": got.Register.Node.Host, "release": got.Register.Node.Version,
		"roster": got.Roster.Workers[0].Host, "servers": got.Roster.Servers[0].Version, "known": got.Register.Known.Roster.Workers[0].Host,
	} {
		if len(text) > limits.MaxText+len("…") || !strings.HasSuffix(text, "w…") {
			t.Errorf("%s has %d bytes", what, len(text))
		}
	}
}
