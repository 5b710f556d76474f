package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/bench"
	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/node/settings"
)

func benchCodecCommand() *cobra.Command {
	var plan bench.CodecPlan
	var size string
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "codec",
		Short: "Time the codecs beside memcpy, and measure their effect on gradients",
		Long: `Time the codecs beside memcpy, and measure their effect on gradients.

Runs on one core of this host and needs no job. Codecs are named as in settings: ` + strings.Join(codec.Names(), ", ") + `,
with arguments as in topk:0.01 or int8:block=256, and the suffix +s2 or +zstd.`,
		Example: `  paceline bench codec
  paceline bench codec --codec topk:0.01 --codec int8:block=256,feedback=on --size 4MiB --json=codec.json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if plan.Bytes, err = settings.ParseSize(size); err != nil {
				return fmt.Errorf("--size %q: a size is a number of bytes, or one with KiB, MiB, GiB", size)
			}
			if plan.Duration < 0 {
				return fmt.Errorf("--duration %v: a time is 0 or more", plan.Duration)
			}
			if err := output.check(); err != nil {
				return err
			}
			report := bench.CodecReport{Head: bench.NewHead("codec")}
			if err := report.MeasureCodecs(plan); err != nil {
				return err
			}
			return output.show(c, report, report.Show)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringArrayVar(&plan.Codecs, "codec", bench.DefaultCodecs(), "`codec` to measure; give the flag once for each")
	f.StringVar(&size, "size", "64MiB", "`size` of the tensor")
	f.DurationVar(&plan.Duration, "duration", 2*time.Second, "`time` for each codec")
	output.add(c)
	return c
}
