// Package policy chooses the codec of each tensor.
//
// A policy is a codec's setting, for all tensors of at least [MinElements] elements, or a list of rules in
// JSON. The first rule that matches a tensor gives its codec; without a match the tensor travels plain:
//
//	[{"names": "*.bias", "codec": "none"},
//	 {"names": ["layer1.*", "layer2.*"], "min_bytes": 4096, "dtypes": ["float32"], "codec": "fp16"},
//	 {"codec": "topk:0.01"}]
//
// Names are patterns as in internal/pattern, min_bytes and max_bytes bound the whole tensor, dtypes are
// floating-point types. All but the codec may be left out; a rule without min_bytes has the bound of
// MinElements.
package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/pattern"
	"github.com/paceline/paceline/internal/units"
)

// MinElements is the size from which a tensor is coded where a policy does not say it: for a smaller one the
// header and the codec's work cost more than its bytes.
const MinElements = 1024

// Policy holds rules. Under the zero Policy, and nil, every tensor travels plain.
type Policy struct{ rules []rule }

type rule struct {
	names    []string // patterns; none for every name
	minBytes int64    // below 0: MinElements holds instead
	maxBytes int64    // below 0 for no bound
	dtypes   []units.DType
	codec    codec.Codec // nil for plain
}

// Tensor is what a rule examines.
type Tensor struct {
	Name  string
	DType units.DType
	Bytes int64
}

// Parse reads a setting or rules. The error names the faulty rule, counted from 1.
func Parse(text string) (*Policy, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return &Policy{}, nil
	}
	if len(text) > limits.MaxPolicy {
		return nil, fmt.Errorf("policy of %d bytes, limit %d", len(text), limits.MaxPolicy)
	}
	if text[0] != '[' {
		c, err := parseCodec(text)
		if err != nil {
			return nil, err
		}
		return &Policy{[]rule{{minBytes: -1, maxBytes: -1, codec: c}}}, nil
	}
	var raw []json.RawMessage
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	p := &Policy{}
	for i, one := range raw {
		r, err := parseRule(one)
		if err != nil {
			return nil, fmt.Errorf("policy, rule %d: %w", i+1, err)
		}
		p.rules = append(p.rules, r)
	}
	return p, nil
}

// parseCodec reads a codec's setting; nil is plain.
func parseCodec(text string) (codec.Codec, error) {
	c, err := codec.Parse(text)
	if err != nil {
		return nil, err
	}
	if len(c.String()) > limits.MaxCodec {
		return nil, fmt.Errorf("codec %q: %d bytes, limit %d", text, len(c.String()), limits.MaxCodec)
	}
	if c == codec.None() {
		return nil, nil
	}
	return c, nil
}

func parseRule(data []byte) (rule, error) {
	var in struct {
		Names    list     `json:"names"`
		MinBytes *int64   `json:"min_bytes"`
		MaxBytes *int64   `json:"max_bytes"`
		DTypes   []string `json:"dtypes"`
		Codec    *string  `json:"codec"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return rule{}, fmt.Errorf("%w: allowed are names, min_bytes, max_bytes, dtypes and codec", err)
	}
	r := rule{names: in.Names, minBytes: -1, maxBytes: -1}
	for _, p := range in.Names {
		if err := pattern.Check(p); err != nil {
			return rule{}, err
		}
	}
	for _, b := range []struct {
		name  string
		given *int64
		to    *int64
	}{{"min_bytes", in.MinBytes, &r.minBytes}, {"max_bytes", in.MaxBytes, &r.maxBytes}} {
		if b.given == nil {
			continue
		}
		if *b.given < 0 {
			return rule{}, fmt.Errorf("%s %d: allowed are 0 and more", b.name, *b.given)
		}
		*b.to = *b.given
	}
	for _, name := range in.DTypes {
		i := slices.IndexFunc(units.DTypes(), func(d units.DType) bool { return d.String() == name })
		if i < 0 || !units.DTypes()[i].Float() {
			return rule{}, fmt.Errorf("dtype %q: allowed are float16, bfloat16, float32 and float64; all others travel plain", name)
		}
		r.dtypes = append(r.dtypes, units.DTypes()[i])
	}
	if in.Codec == nil {
		return rule{}, errors.New(`it names no codec; "none" is plain`)
	}
	var err error
	r.codec, err = parseCodec(*in.Codec)
	return r, err
}

// list is one text or several.
type list []string

// UnmarshalJSON implements json.Unmarshaler.
func (l *list) UnmarshalJSON(data []byte) error {
	if string(data) == "null" { // not given
		return nil
	}
	var one string
	if json.Unmarshal(data, &one) == nil {
		*l = list{one}
		return nil
	}
	var many []string
	if err := json.Unmarshal(data, &many); err != nil {
		return errors.New("names are a pattern or a list of patterns")
	}
	if len(many) == 0 {
		return errors.New("names is an empty list, which matches no tensor: leave it out for all tensors")
	}
	*l = many
	return nil
}

// Choose gives the codec of a tensor, nil for plain. An empty tensor is plain.
func (p *Policy) Choose(t Tensor) codec.Codec {
	if p == nil || t.Bytes == 0 || !t.DType.Float() {
		return nil
	}
	for i := range p.rules {
		if p.rules[i].fits(&t) {
			return p.rules[i].codec
		}
	}
	return nil
}

func (r *rule) fits(t *Tensor) bool {
	least := r.minBytes
	if least < 0 {
		least = MinElements * int64(t.DType.Size())
	}
	return t.Bytes >= least && (r.maxBytes < 0 || t.Bytes <= r.maxBytes) &&
		(len(r.dtypes) == 0 || slices.Contains(r.dtypes, t.DType)) &&
		(len(r.names) == 0 || slices.ContainsFunc(r.names, func(p string) bool { return pattern.Match(p, t.Name) }))
}

// Traits are the properties of the rules' codecs, in their order.
func (p *Policy) Traits() []codec.Traits {
	list := make([]codec.Traits, len(p.rules))
	for i, r := range p.rules {
		if r.codec == nil {
			list[i] = codec.TraitsOf(codec.None())
		} else {
			list[i] = codec.TraitsOf(r.codec)
		}
	}
	return list
}
