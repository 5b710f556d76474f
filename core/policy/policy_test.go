package policy_test

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

const rules = `[
  {"names": "*.bias", "codec": "none"},
  {"names": ["layer1.*", "enc/*"], "min_bytes": 0, "max_bytes": 4096, "dtypes": ["float32"], "codec": "fp16"},
  {"min_bytes": 100000, "codec": "topk:0.01"},
  {"dtypes": ["float64"], "codec": "int8"}
]`

func TestTheFirstRuleThatFitsWins(t *testing.T) {
	for _, c := range []struct {
		text, name string
		dtype      units.DType
		bytes      int64
		want       string
	}{
		{"", "w", units.Float32, 1 << 20, "none"},
		{"none", "w", units.Float32, 1 << 20, "none"},
		{"none+s2", "w", units.Float32, 1 << 20, "none+s2"},
		{" int8 ", "w", units.Float32, 4 * 1024, "int8:block=512"},
		{"int8", "w", units.Float32, 4 * 1023, "none"},
		{"int8", "w", units.Float16, 2 * 1024, "int8:block=512"},
		{"int8", "w", units.Int32, 1 << 20, "none"},
		{rules, "layer1.bias", units.Float32, 1 << 20, "none"},
		{rules, "layer1.weight", units.Float32, 4, "fp16"},
		{rules, "enc/0/w", units.Float32, 4096, "fp16"},
		{rules, "layer1.weight", units.Float32, 0, "none"},
		{rules, "layer1.weight", units.Float16, 4, "none"},
		{rules, "layer1.weight", units.Float32, 1 << 20, "topk:0.01"},
		{rules, "w", units.Float64, 8 * 1024, "int8:block=512"},
		{rules, "w", units.Float64, 8 * 1023, "none"},
		{"[]", "w", units.Float32, 1 << 20, "none"},
	} {
		p, err := policy.Parse(c.text)
		if err != nil {
			t.Fatal(err)
		}
		got := "none"
		if k := p.Choose(policy.Tensor{Name: c.name, DType: c.dtype, Bytes: c.bytes}); k != nil {
			got = k.String()
		}
		if got != c.want {
			t.Errorf("%d bytes of %v %q under %.40q: %s, want %s", c.bytes, c.dtype, c.name, c.text, got, c.want)
		}
	}
}

func TestAWrongPolicyIsAnErrorThatNamesTheRule(t *testing.T) {
	for text, want := range map[string]string{
		"topk:2":                                  "shares over 0 and up to 1",
		"nonsense":                                "known are: bf16",
		"[1]":                                     "rule 1",
		"[{]":                                     "policy",
		`[{"codec": 1}]`:                          "rule 1",
		`[{"codec": "fp16"}, {"codec": "fp17"}]`:  "rule 2: unknown codec \"fp17\"",
		`[{"codec": "fp16", "name": "x"}]`:        "unknown field \"name\"",
		`[{"names": "w"}]`:                        "it names no codec",
		`[{"names": "[odd", "codec": "fp16"}]`:    "not a pattern",
		`[{"names": 7, "codec": "fp16"}]`:         "a pattern or a list",
		`[{"names": [], "codec": "fp16"}]`:        "names is an empty list",
		`[{"dtypes": ["int8"], "codec": "fp16"}]`: "travel plain",
		`[{"min_bytes": -1, "codec": "fp16"}]`:    "allowed are 0 and more",
		strings.Repeat(" ", 9) + "topk:" + strings.Repeat("9", limits.MaxPolicy): "limit",
	} {
		if _, err := policy.Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %q", text, err, want)
		}
	}
}

// Python's None is a rule's argument that is not given.
func TestNullIsNotGiven(t *testing.T) {
	p, err := policy.Parse(`[{"names": null, "min_bytes": null, "codec": "fp16"}]`)
	if err != nil {
		t.Fatal(err)
	}
	if p.Choose(policy.Tensor{Name: "w", DType: units.Float32, Bytes: 1 << 20}) == nil {
		t.Error("the rule matches nothing")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(rules)
	f.Add("topk:0.01+s2")
	f.Fuzz(func(_ *testing.T, text string) {
		if p, err := policy.Parse(text); err == nil {
			p.Choose(policy.Tensor{Name: "w", DType: units.Float32, Bytes: 1 << 20})
		}
	})
}
