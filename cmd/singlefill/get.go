package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/msgcheck"
	"github.com/singlefill/singlefill/internal/value"
)

func prepareGet(x *execution, flags *flag.FlagSet) func(ctx context.Context, args []string) error {
	name := flags.String("codec", "auto", "`codec` of the payload: msgpack, json, raw, or auto: as the entry says")
	payload := flags.Bool("payload", false, "print the bytes of the payload only, as they are")
	return func(ctx context.Context, args []string) error {
		if _, ok := decoders[*name]; !ok && *name != "auto" {
			return x.wrong("singlefill: -codec is %q: auto, msgpack, json or raw is allowed", *name)
		}
		return x.get(ctx, args[0], args[1], *name, *payload)
	}
}

func (x *execution) get(ctx context.Context, namespace, key, name string, payload bool) error {
	redisKey, err := redisKeyOf(namespace, key)
	if err != nil {
		return err
	}
	var data *redis.StringCmd
	var ttl *redis.DurationCmd
	_, _ = x.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		data, ttl = p.Get(ctx, redisKey), p.PTTL(ctx, redisKey)
		return nil
	})
	switch err := data.Err(); {
	case errors.Is(err, redis.Nil):
		return fmt.Errorf("%s has no entry %s", namespace, printable(key))
	case client.WrongType(err):
		return fmt.Errorf("%s holds no entry, but data of another type", redisKey)
	case err != nil:
		return err
	case ttl.Err() != nil:
		return ttl.Err()
	}
	stored, _ := data.Bytes()
	e, err := entry.Parse(stored)
	if err != nil {
		return fmt.Errorf("%s holds no entry: %w", redisKey, err)
	}
	if payload {
		_, err := x.stdout.Write(e.Payload)
		return err
	}
	r := rowOf(key, string(stored[:e.PayloadAt()]), int64(len(stored)), ttl.Val(), time.Now())
	decoded, name, err := decode(e, name)
	if err != nil {
		return err
	}
	if x.json {
		return x.printJSON(struct {
			row
			Codec   string          `json:"codec,omitempty"`
			Payload json.RawMessage `json:"payload,omitempty"`
		}{r, name, decoded})
	}
	x.describe(r, redisKey)
	if e.NotFound {
		return nil
	}
	fmt.Fprintf(x.stdout, "payload:  %d bytes, %s\n\n", len(e.Payload), name)
	if strings.HasSuffix(name, "raw") && !utf8.Valid(e.Payload) {
		fmt.Fprint(x.stdout, hex.Dump(e.Payload))
		return nil
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, decoded, "", "  "); err != nil {
		return err
	}
	fmt.Fprintln(x.stdout, &indented)
	return nil
}

func redisKeyOf(namespace, key string) (string, error) {
	if key == "" {
		return "", errors.New("KEY is empty: a cache has no such key")
	}
	return value.Key(namespace, key), nil
}

// describe prints what a header says in words.
func (x *execution) describe(r row, redisKey string) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(x.stdout, "%-9s "+format+"\n", append([]any{name + ":"}, args...)...)
	}
	line("key", "%s (%s in Redis)", printable(r.Key), printable(redisKey))
	state := x.colour(r.State)
	if r.State == "not found" {
		state += ": the source had no such value"
	}
	line("state", "%s", state)
	line("written", "%s, %v ago, by the clock of its writer", r.Written.Format(time.RFC3339), r.Age)
	if r.Load > 0 {
		line("load", "took %v", r.Load)
	} else {
		line("load", "none: it was set, or loaded in less than a millisecond")
	}
	line("fresh", "%s", r.fresh())
	if r.GoneIn < 0 {
		line("gone", "never: the key has no TTL, so it is none of singlefill's")
	} else {
		line("gone", "in %v", r.GoneIn)
	}
	line("size", "%s", size(r.Bytes))
	line("version", "%d", r.Version)
}

// maxNesting is how deep values may be nested.
const maxNesting = 1000

// decoders return a payload as JSON.
var decoders = map[string]func(payload []byte) (json.RawMessage, error){
	"msgpack": func(payload []byte) (json.RawMessage, error) {
		if _, err := msgcheck.Check(payload, maxNesting); err != nil {
			return nil, err
		}
		d := msgpack.NewDecoder(bytes.NewReader(payload))
		d.UseLooseInterfaceDecoding(true)
		d.SetMapDecoder(mapOf)
		v, err := d.DecodeInterface()
		if err != nil {
			return nil, err
		}
		return json.Marshal(jsonable(v))
	},
	"json": func(payload []byte) (json.RawMessage, error) {
		if !json.Valid(payload) {
			return nil, errors.New("not JSON")
		}
		return payload, nil
	},
	"raw": func(payload []byte) (json.RawMessage, error) {
		if utf8.Valid(payload) {
			return json.Marshal(string(payload))
		}
		return json.Marshal(payload) // base64
	},
}

// mapOf returns a map, whose keys may be of any type, with their texts as keys.
func mapOf(d *msgpack.Decoder) (any, error) {
	n, err := d.DecodeMapLen()
	m := make(map[string]any, max(n, 0))
	for ; n > 0 && err == nil; n-- {
		var key any
		if key, err = d.DecodeInterfaceLoose(); err == nil {
			m[fmt.Sprint(key)], err = d.DecodeInterfaceLoose()
		}
	}
	return m, err
}

// jsonable writes as text what JSON does not have, such as infinity.
func jsonable(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key := range v {
			v[key] = jsonable(v[key])
		}
	case []any:
		for i := range v {
			v[i] = jsonable(v[i])
		}
	default:
		if _, err := json.Marshal(v); err != nil {
			return fmt.Sprint(v)
		}
	}
	return v
}

// decode returns the payload as JSON, and its codec. With auto that is the codec that the header names. If the header
// names none, decode tries codecs in turn, and may guess wrong: of them only msgpack accepts a payload of one byte, so
// a 7 that Raw or JSON has stored becomes 55. What decode cannot decode it shows as Raw.
func decode(e entry.Entry, name string) (json.RawMessage, string, error) {
	if e.NotFound {
		return nil, "", nil
	}
	if name != "auto" {
		decoded, err := decoders[name](e.Payload)
		if err != nil {
			return nil, "", fmt.Errorf("the payload is not %s: %w", name, err)
		}
		return decoded, name, nil
	}
	names, otherwise := []string{"msgpack", "json"}, "raw"
	if e.Format != 0 {
		name = cmp.Or(codec.NameOf(e.Format), "unknown")
		names, otherwise = []string{name}, name+" as raw"
	}
	for _, name := range names {
		// Of zstd+json, a short value is plain json.
		if decoder := decoders[strings.TrimPrefix(name, "zstd+")]; decoder != nil {
			if decoded, err := decoder(e.Payload); err == nil {
				return decoded, name, nil
			}
		}
	}
	decoded, err := decoders["raw"](e.Payload)
	return decoded, otherwise, err
}

func prepareTTL(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error {
		redisKey, err := redisKeyOf(args[0], args[1])
		if err != nil {
			return err
		}
		rows, err := x.rows(ctx, args[0], []string{redisKey})
		switch {
		case err != nil:
			return err
		case len(rows) == 0:
			return fmt.Errorf("%s has no entry %s", args[0], printable(args[1]))
		case rows[0].State == foreign:
			return fmt.Errorf("%s holds no entry", redisKey)
		case x.json:
			return x.printJSON(rows[0])
		}
		r := rows[0]
		fmt.Fprintf(x.stdout, "%s: fresh %s, gone in %v\n", x.colour(r.State), r.fresh(), r.GoneIn)
		return nil
	}
}
