package codec

import (
	"fmt"
	"hash/fnv"
	"strings"
)

// Answer is the codec of what a server sends back for pushes coded by c: the same, but topk of the same share
// for dgc, whose momentum is the worker's own.
func Answer(c Codec) Codec {
	body, stage := splitStage(c.String())
	name, arguments, _ := strings.Cut(body, ":")
	if name != "dgc" {
		return c
	}
	parts := strings.Split(arguments, ",")
	kept := parts[:0]
	for _, p := range parts {
		if !strings.HasPrefix(p, "momentum=") {
			kept = append(kept, p)
		}
	}
	return parsed(setting("topk", kept...) + stage)
}

// Bare is the codec without a residual: for differences to what the other end has, where what a message
// lacked is a part of the next difference by itself.
func Bare(c Codec) Codec {
	c = Answer(c)
	if c.ResidualBytes(1) == 0 {
		return c
	}
	body, stage := splitStage(c.String())
	body = strings.TrimSuffix(strings.TrimSuffix(body, "feedback=on"), ",")
	bare, err := Parse(strings.TrimSuffix(body, ":") + stage) // its own choice may be none
	if err != nil || bare.ResidualBytes(1) > 0 {
		separator := ","
		if !strings.Contains(body, ":") {
			separator = ":"
		}
		bare = parsed(body + separator + "feedback=off" + stage)
	}
	return bare
}

// Precise reports whether a message is so near to the tensor that it can stand for it: whoever needs a tensor,
// rather than a sum of many, needs nothing else.
func Precise(c Codec) bool {
	body, _ := splitStage(c.String())
	name, _, _ := strings.Cut(body, ":")
	return name == "none" || name == "fp16" || name == "bf16"
}

// KeyOf is the Key of streams for a partition of a tensor: it follows from names alone, so that the same job
// draws the same numbers again, in whatever order its tensors are declared.
func KeyOf(processSet uint32, name string, part uint32) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%d/%s", processSet, part, name)
	return h.Sum64()
}

// parsed is Parse of what was made of a codec's own setting.
func parsed(setting string) Codec {
	c, err := Parse(setting)
	if err != nil {
		panic(err)
	}
	return c
}
