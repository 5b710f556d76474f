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

// Difference is the codec by which whoever has sent a tensor before sends what has changed since: both ends add
// what the message says to what the receiver has, so that what a message lacks is a part of the next difference
// by itself, and no residual is kept (where the codec takes one, it is zeros each time). The receiver only comes
// nearer if a message is nearer to the difference than nothing is. qsgd and terngrad are right in the mean and no
// more than that: their noise may be greater than the difference, and int8 or int4 of the same blocks stand in.
func Difference(c Codec) Codec {
	body, stage := splitStage(Answer(c).String())
	name, arguments, _ := strings.Cut(body, ":")
	switch name {
	case "randomk":
		return without(body, "feedback=off", stage) // which would send elements times the length of their stratum
	case "qsgd", "terngrad":
		coarse := "int4"
		block := ""
		for _, p := range strings.Split(arguments, ",") {
			if levels, ok := strings.CutPrefix(p, "levels="); ok && len(levels) > 1 { // 10 and more
				coarse = "int8"
			}
			if strings.HasPrefix(p, "block=") {
				block = p
			}
		}
		return parsed(setting(coarse, block) + stage)
	}
	bare := without(body, "feedback=on", stage)
	if bare.ResidualBytes(1) == 0 {
		return bare
	}
	separator := ","
	if !strings.Contains(body, ":") {
		separator = ":"
	}
	return parsed(body + separator + "feedback=off" + stage)
}

// without is the codec of a setting but for one argument, where it has that.
func without(body, argument, stage string) Codec {
	less, has := strings.CutSuffix(body, argument)
	if !has {
		return parsed(body + stage)
	}
	return parsed(strings.TrimRight(less, ":,") + stage)
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
