package codec

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/nearest"
)

// Maker makes a codec of its arguments. Parse checks the errors that these collect afterwards.
type Maker func(a *Arguments) Codec

// makers has a line for each codec.
var makers = map[string]Maker{
	"none":      newNone,
	"fp16":      newFloat16,
	"bf16":      newBFloat16,
	"int8":      newInt8,
	"int4":      newInt4,
	"onebit":    newOneBit,
	"qsgd":      newQSGD,
	"terngrad":  newTernGrad,
	"natural":   newNatural,
	"topk":      newTopK,
	"randomk":   newRandomK,
	"threshold": newThreshold,
	"dgc":       newDGC,
}

// Register adds a codec from outside this package. Call it from an init function, in every process of a job; a name
// in use panics.
func Register(name string, m Maker) {
	if _, taken := makers[name]; taken {
		panic(fmt.Sprintf("codec: %q is registered twice", name))
	}
	makers[name] = m
}

// Names lists the codecs, sorted.
func Names() []string { return slices.Sorted(maps.Keys(makers)) }

// Parse makes the codec that a setting names: name[:argument[,argument]…][+stage], where an argument is
// a value or parameter=value, and stage one of the lossless ones, s2 and zstd.
func Parse(setting string) (Codec, error) {
	body, stage := splitStage(setting)
	if stage != "" {
		stage = stage[1:]
		if !slices.Contains(stages, stage) {
			return nil, fmt.Errorf("codec %q: unknown lossless stage %q: allowed are %s", setting, stage, strings.Join(stages, ", "))
		}
	}
	name, text, _ := strings.Cut(body, ":")
	newCodec, ok := makers[name]
	if !ok {
		return nil, unknownError(fmt.Sprintf("unknown codec %q, %s", setting, nearest.Known(name, Names())))
	}
	a := parseArguments(text)
	c := newCodec(a)
	if err := a.err(); err != nil {
		return nil, fmt.Errorf("codec %q: %w", setting, err)
	}
	if stage != "" {
		return newLossless(c, stage), nil
	}
	return c, nil
}

// unknownError is the error for a name without a codec.
type unknownError string

func (e unknownError) Error() string { return string(e) }

// IsUnknown reports whether an error of Parse is about an unknown name: the caller may know other codecs.
func IsUnknown(err error) bool { return errors.As(err, new(unknownError)) }

// splitStage cuts a setting before its lossless stage, which keeps its plus.
func splitStage(setting string) (body, stage string) {
	if i := strings.LastIndexByte(setting, '+'); i >= 0 && !startsWithDigit(setting[i+1:]) { // as in 1e+3
		return setting[:i], setting[i:]
	}
	return setting, ""
}

func startsWithDigit(s string) bool { return s != "" && s[0] >= '0' && s[0] <= '9' }
