-- Makes a key live for ms more, at least. Where the right to do so is missing, a key without a TTL is removed, since it
-- would stay for ever. PEXPIRE cannot be tried first: after any write a script may exceed maxmemory.
local function live(key, ms)
  local left = redis.call('PTTL', key)
  if left >= ms then return end
  ms = string.format('%.0f', ms)
  local reply = redis.pcall('PEXPIRE', key, ms)
  if type(reply) == 'table' and reply.err then
    if left == -1 then redis.call('UNLINK', key) end
    redis.call('PEXPIRE', key, ms) -- fails again
  end
end

-- Drops what has ended, of fields of the book that are drawn at random: three for each tag that the script writes,
-- and as many again while a quarter of them had ended. So a book has about as many fields as are alive, and no script
-- looks at many more than a thousand. A load older than a mark that is dropped is refused by the floor.
local function trim(book, now, floor, written)
  local looked = 0
  repeat
    local some, ended, floorBefore = redis.call('HRANDFIELD', book, 3 * written, 'WITHVALUES'), {}, floor
    for i = 1, #some, 2 do
      local kind, value = string.sub(some[i], 1, 1), some[i + 1]
      if kind == 't' and tonumber(value) < now then
        ended[#ended + 1] = some[i]
      elseif kind == 'm' then
        local n, ends = string.match(value, '^(%d+) (%d+)$')
        if tonumber(ends) < now then
          ended[#ended + 1], floor = some[i], math.max(floor, tonumber(n))
        end
      end
    end
    if floor > floorBefore then redis.call('HSET', book, 'f', string.format('%.0f', floor)) end
    if #ended > 0 then redis.call('HDEL', book, unpack(ended)) end
    looked = looked + #some / 2
  until 8 * #ended <= #some or looked > 1000
end
