package codec

import "testing"

func TestWhatAServerAnswersByAndWhatHasNoResidual(t *testing.T) {
	for _, c := range []struct{ setting, answer, bare string }{
		{"none+s2", "none+s2", "none+s2"},
		{"fp16", "fp16", "fp16"},
		{"fp16:feedback=on", "fp16:feedback=on", "fp16"},
		{"int8:block=64,feedback=on+zstd", "int8:block=64,feedback=on+zstd", "int8:block=64+zstd"},
		{"onebit:block=1024", "onebit:block=1024", "onebit:block=1024,feedback=off"},
		{"topk:0.05,warmup=10+s2", "topk:0.05,warmup=10+s2", "topk:0.05,warmup=10,feedback=off+s2"},
		{"randomk:count=9", "randomk:count=9", "randomk:count=9,feedback=off"},
		{"threshold:1e+30", "threshold:1e+30", "threshold:1e+30,feedback=off"},
		{"dgc:0.01,momentum=0.5,warmup=3+zstd", "topk:0.01,warmup=3+zstd", "topk:0.01,warmup=3,feedback=off+zstd"},
		{"dgc", "topk:0.001", "topk:0.001,feedback=off"},
	} {
		k := parsed(c.setting)
		if got := Answer(k).String(); got != c.answer {
			t.Errorf("the answer to %s is %s, want %s", c.setting, got, c.answer)
		}
		if got := Bare(k); got.String() != c.bare || got.ResidualBytes(8) != 0 {
			t.Errorf("%s bare is %s, want %s", c.setting, got, c.bare)
		}
	}
	for _, name := range Names() { // all that are registered
		if name == "threshold" {
			name += ":1"
		}
		if c := Bare(parsed(name + "+s2")); c.ResidualBytes(8) != 0 {
			t.Errorf("%s has a residual", c)
		}
	}
}

func TestStreamsOfPartitionsDiffer(t *testing.T) {
	if KeyOf(0, "w", 1) == KeyOf(0, "w", 2) || KeyOf(0, "w", 1) == KeyOf(1, "w", 1) {
		t.Error("keys do not tell partitions apart")
	}
}
