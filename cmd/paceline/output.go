package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

// toTerminal is --json without a file.
const toTerminal = "-"

// jsonSwitch is the flag --json, the same in every command: alone it prints JSON in place of the text, with a file it
// writes the JSON there and prints the text.
type jsonSwitch struct{ to string }

func (j *jsonSwitch) add(c *cobra.Command) {
	c.Flags().StringVar(&j.to, "json", "", "print the results as JSON; --json=`FILE` writes them to a file beside the text")
	c.Flags().Lookup("json").NoOptDefVal = toTerminal
}

// check finds a file that cannot be written, before there is anything to write.
func (j *jsonSwitch) check() error {
	if j.to == "" || j.to == toTerminal {
		return nil
	}
	file, err := os.OpenFile(j.to, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return file.Close()
}

// text reports whether the text is printed, because no JSON takes its place.
func (j *jsonSwitch) text() bool { return j.to != toTerminal }

// show writes v where the switch says, and the text unless the JSON is in its place.
func (j *jsonSwitch) show(c *cobra.Command, v any, text func(io.Writer)) error {
	if j.text() {
		text(c.OutOrStdout())
	}
	return j.write(c, v)
}

// write writes v where the switch says.
func (j *jsonSwitch) write(c *cobra.Command, v any) error {
	switch j.to {
	case "":
		return nil
	case toTerminal:
		return printJSON(c.OutOrStdout(), v)
	}
	return writeJSON(j.to, v)
}

// printJSON writes v as JSON with indentation.
func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func writeJSON(file string, v any) error {
	var b bytes.Buffer
	if err := printJSON(&b, v); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o666)
}
