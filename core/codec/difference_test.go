package codec

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestWhatAServerAnswersBy(t *testing.T) {
	for _, c := range []struct{ setting, answer, difference string }{
		{"none+s2", "none+s2", "none+s2"},
		{"fp16", "fp16", "fp16"},
		{"fp16:feedback=on", "fp16:feedback=on", "fp16"},
		{"int8:block=64,feedback=on+zstd", "int8:block=64,feedback=on+zstd", "int8:block=64+zstd"},
		{"onebit:block=1024", "onebit:block=1024", "onebit:block=1024,feedback=off"},
		{"topk:0.05,warmup=10+s2", "topk:0.05,warmup=10+s2", "topk:0.05,warmup=10,feedback=off+s2"},
		{"randomk:count=9", "randomk:count=9", "randomk:count=9"},
		{"randomk:0.1,feedback=off+s2", "randomk:0.1,feedback=off+s2", "randomk:0.1+s2"},
		{"qsgd:levels=3,block=64", "qsgd:levels=3,block=64", "int4:block=64"},
		{"qsgd:levels=100,coding=elias+s2", "qsgd:levels=100,block=256,coding=elias+s2", "int8:block=256+s2"},
		{"terngrad", "terngrad:clip=2.5,block=4096", "int4:block=4096"},
		{"threshold:1e+30", "threshold:1e+30", "threshold:1e+30,feedback=off"},
		{"dgc:0.01,momentum=0.5,warmup=3+zstd", "topk:0.01,warmup=3+zstd", "topk:0.01,warmup=3,feedback=off+zstd"},
		{"dgc", "topk:0.001", "topk:0.001,feedback=off"},
	} {
		k := parsed(c.setting)
		if got := k.Answer().String(); got != c.answer {
			t.Errorf("the answer to %s is %s, want %s", c.setting, got, c.answer)
		}
		if got := k.Difference().String(); got != c.difference {
			t.Errorf("the difference to %s is %s, want %s", c.setting, got, c.difference)
		}
	}
}

// Whoever follows a tensor by differences comes to it, by every codec but threshold, which stays that near.
func TestDifferencesLeadToTheTensor(t *testing.T) {
	const n, steps = 5000, 300
	random := rand.New(rand.NewPCG(1, 2))
	want := make([]float32, n)
	for i := range want {
		want[i] = float32(random.NormFloat64())
	}
	for _, name := range append(Names(), "qsgd:levels=1", "qsgd:levels=100", "natural:levels=1", "topk:0.05", "randomk:0.05,feedback=off", "terngrad:block=8192", "onebit:block=8192") {
		switch name {
		case "threshold":
			name += ":0.01"
		case "dgc", "topk", "randomk":
			name += ":0.05"
		}
		c := parsed(name).Difference()
		base, difference := make([]float32, n), make([]float32, n)
		message := make([]byte, c.MaxEncoded(n))
		for step := range steps {
			for i := range difference {
				difference[i] = want[i] - base[i]
			}
			size := c.Encode(message, raw(difference), make([]byte, c.ResidualBytes(n)), Stream{Iteration: uint64(step)})
			if err := c.DecodeAdd(raw(base), message[:size]); err != nil {
				t.Fatal(err)
			}
		}
		var off float64
		for i := range base {
			off += math.Abs(float64(want[i] - base[i]))
		}
		if off /= n; off > 0.01 {
			t.Errorf("%s, for differences %s, is off by %g in the mean", name, c, off)
		}
	}
}

func TestStreamsOfPartitionsDiffer(t *testing.T) {
	if KeyOf(0, "w", 1) == KeyOf(0, "w", 2) || KeyOf(0, "w", 1) == KeyOf(1, "w", 1) {
		t.Error("keys do not tell partitions apart")
	}
}

// parsed is Parse of a setting that is right.
func parsed(setting string) Codec {
	c, err := Parse(setting)
	if err != nil {
		panic(err)
	}
	return c
}
