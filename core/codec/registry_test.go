package codec

import (
	"slices"
	"strings"
	"testing"
)

func TestBadSettingsSayWhatIsAllowed(t *testing.T) {
	for setting, want := range map[string]string{
		"":                             "unknown codec \"\", known are: bf16, dgc, fp16",
		"gzip":                         "known are",
		"topk:0":                       "value \"0\": allowed are shares over 0 and up to 1",
		"topk:1.5":                     "allowed are shares over 0 and up to 1",
		"topk:NaN":                     "allowed are shares over 0 and up to 1",
		"topk:-0.1":                    "allowed are shares over 0 and up to 1",
		"topk:0.1,count=5":             "exclude each other",
		"topk:count=5,warmup=3":        "warmup needs a share",
		"topk:count=0":                 "count \"0\": allowed are whole numbers from 1",
		"topk:0.1,0.2":                 "given twice",
		"randomk:2":                    "allowed are shares",
		"qsgd:levels=0":                "levels \"0\": allowed are whole numbers from 1 to 32767",
		"qsgd:levels=40000":            "whole numbers from 1 to 32767",
		"qsgd:coding=huffman":          "coding \"huffman\": allowed are packed, elias",
		"natural:levels=128":           "whole numbers from 1 to 127",
		"int8:block=4":                 "block \"4\": allowed are whole numbers from 8 to 8192",
		"int8:blocks=4":                "unknown parameter \"blocks\": allowed are block, feedback",
		"int8:256":                     "\"256\" has no name: allowed are block, feedback",
		"none:1":                       "there are none",
		"fp16:feedback=maybe":          "feedback \"maybe\": allowed are off, on",
		"terngrad:clip=-1":             "clip \"-1\": allowed are numbers from 1 to 100, and 0",
		"threshold":                    "threshold is missing",
		"threshold:0":                  "numbers over 0",
		"threshold:inf":                "numbers over 0",
		"dgc:0.01,momentum=1":          "momentum \"1\": allowed are numbers from 0 to below 1",
		"int8+gzip":                    "unknown lossless stage \"gzip\": allowed are s2, zstd",
		"int8+":                        "unknown lossless stage",
		"topk:0.01,warmup=x,nothing=1": "warmup \"x\"",
	} {
		if c, err := Parse(setting); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v; want %q", setting, c, err, want)
		}
	}
}

func TestASettingIsWhatMakesTheSameCodec(t *testing.T) {
	for _, setting := range append(settings, "threshold:1e+3", "threshold:1e+3+s2") {
		c := mustParse(t, setting)
		again := mustParse(t, c.String())
		if again.String() != c.String() || again.MaxEncoded(12345) != c.MaxEncoded(12345) || again.ResidualBytes(9) != c.ResidualBytes(9) {
			t.Errorf("%q is %q is %q", setting, c, again)
		}
	}
	if got := mustParse(t, "int8:feedback=on").String(); got != "int8:block=512,feedback=on" {
		t.Error(got)
	}
}

func TestNamesAreAllCodecs(t *testing.T) {
	for _, name := range Names() {
		if !slices.ContainsFunc(settings, func(s string) bool { return strings.HasPrefix(s, name) }) {
			t.Errorf("%s is not tested", name)
		}
	}
}
